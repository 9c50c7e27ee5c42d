"""One replica: engine loop, model runner, models, block storage and copies."""
