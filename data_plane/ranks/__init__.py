"""What makes one worker group of several processes: how they meet, call each other, and end together."""
