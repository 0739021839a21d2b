"""What surrounds model and optimizer: schedules of learning rates, estimates of memory."""
