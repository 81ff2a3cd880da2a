"""What a worker does for the case that another one dies: it saves the last completed step."""
