"""DFlash drafters: checkpoint schemas, modules, visibility rules and the pairing check, one file each."""
