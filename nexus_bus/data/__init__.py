"""LeRobot datasets in (v2.0, v2.1, v3.0) and out (v3.0): recorded from experts, imported, checked, sampled, read by SFT."""
