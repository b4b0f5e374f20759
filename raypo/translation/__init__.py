"""Translation of the settings of TRL, verl and OpenRLHF into a run file (`raypo init`)."""
