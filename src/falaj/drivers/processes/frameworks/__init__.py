"""Launch contracts: how the processes of each framework are started. Pure functions of a launch."""
