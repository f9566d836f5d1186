from hyradix.runner.threads import prepare_environment

prepare_environment()  # before torch: tests share the machine
