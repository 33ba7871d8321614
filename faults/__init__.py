"""The faults that come with the project: one file each, in a folder per family."""
