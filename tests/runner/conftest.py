from hyradix.kernels.process import prepare_process

prepare_process()  # before torch: tests share the machine
