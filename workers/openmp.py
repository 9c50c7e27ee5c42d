"""How OpenMP's threads wait for each other in a worker; read when its runtime is loaded."""

# A step is many short products, and waking up takes a thread longer than to wait for the next one:
# so they look for work for about 0.3 ms before they sleep, as long as the host takes from one step
# to the next. Those that spin for longer starve the others of a node with few cores.
WAITS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
