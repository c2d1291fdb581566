"""Foundation of all packages: arrays of any framework, checks, users' mistakes, installed packages."""
