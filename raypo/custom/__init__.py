"""Load and check the functions and classes that a run file names by import path."""
