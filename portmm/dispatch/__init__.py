"""From a problem to a kernel that is ready to run."""
