"""Static checks of a run's input, which take less than a second and import nothing heavy."""
