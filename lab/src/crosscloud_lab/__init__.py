"""Several complete Kubernetes clusters on one Linux machine, for tests and the demo."""
