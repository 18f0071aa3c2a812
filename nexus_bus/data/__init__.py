"""LeRobot v3.0 datasets in and out: recorded from experts, read by SFT."""
