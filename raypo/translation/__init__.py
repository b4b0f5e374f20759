"""Translation of the settings of TRL and verl into a run file (`raypo init`)."""
