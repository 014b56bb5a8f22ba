"The commands of the launchers: `LAUNCHERS[name](n)` is how a script is started with n workers"
import sys

PYTHON = sys.executable
# without these Accelerate asks for a configuration, or says which it takes; the port is any that is free
ARGS = ['--num_machines', '1', '--main_process_port', '0', '--mixed_precision', 'no', '--dynamo_backend', 'no']
LAUNCHERS = {'python': lambda n: [PYTHON],
             'fastdist': lambda n: [PYTHON, '-m', 'fastdist', 'launch', '-n', f'{n}'],
             'torchrun': lambda n: [PYTHON, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', f'{n}'],
             'accelerate': lambda n: [PYTHON, '-m', 'accelerate.commands.launch', '--multi_gpu', '--num_processes', f'{n}', *ARGS]}
