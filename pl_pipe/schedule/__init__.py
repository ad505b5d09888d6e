"""What each rank does, in order: schedules as data. partition -> *schedule* -> simulate, runtime."""
