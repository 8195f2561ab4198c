"""What the fork adds to reinforcement learning with verifiable rewards; everything is off unless a flag asks for it."""
