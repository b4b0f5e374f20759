"""Loading and checking of the functions and classes that a run file names by import path."""
