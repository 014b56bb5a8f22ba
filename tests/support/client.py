"""In place of `python` on the hosts of hosts.py, which put the lines REAL, PYTHON and DOOR before it: has the door of warm.py start the
process.

It passes arguments, environment, folder and streams on, then signals, and ends as the process does. If it is killed, so is the process.
Runs by the interpreter of the system with nothing of its environment (-IS), so that it takes a hundredth of a second."""
import array, json, os, signal, socket, struct, sys

# the first argument is by what Python finds its environment
if os.environ.get('FASTDIST_TEST_COLD'): os.execv(REAL, [PYTHON, *sys.argv[1:]])
door = socket.socket(socket.AF_UNIX)
door.connect(DOOR)
umask = os.umask(0)
os.umask(umask)
req = dict(args=[PYTHON, *sys.argv[1:]], env=dict(os.environ), cwd=os.getcwd(), umask=umask)
data = json.dumps(req).encode()
door.sendmsg([struct.pack('>I', len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))])
door.sendall(data)
for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT):
    signal.signal(s, lambda s, _: door.sendall(bytes([s])))
status = struct.unpack('>i', door.recv(4, socket.MSG_WAITALL))[0]
if status == 1 << 30: os.execv(REAL, req['args'])  # the door cannot
if status >= 0: os._exit(status)
signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
os.kill(os.getpid(), -status)
