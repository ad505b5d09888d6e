"""Pictures and tables of profiles, plans and runs."""
