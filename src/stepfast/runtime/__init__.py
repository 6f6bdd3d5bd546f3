"""Touch the world: the ports, the driver and the transports."""
