"""Translation of a TRL script, or of a verl or OpenRLHF command, into a run file (`raypo init`)."""
