"""Training that adapts while it runs: monitors return numbers, policies decide. KungFu, OSDI'20."""
