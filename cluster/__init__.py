"""What clients and operators meet: controller, gateway, command line, simulator."""
