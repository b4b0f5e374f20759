"""Static checks of a run's input. They take less than a second and import nothing heavy."""
