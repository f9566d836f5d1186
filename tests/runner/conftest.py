import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: tests share the machine
