"""Functions and classes that a run file names by import path, and how they are run."""
