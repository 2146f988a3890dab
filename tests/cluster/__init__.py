"""Real clusters on one machine. Needs root and Debian's packages (`setup.sh`); run by `make test-cluster` alone."""
