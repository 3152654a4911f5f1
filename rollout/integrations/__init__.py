"""Other people's trainers on this service, through the plug points that they publish."""
