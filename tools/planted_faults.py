"""Which test finds which fault? Plants each of these faults, one by one, in a copy of the tree, and runs the tests that have to find it.

    python tools/planted_faults.py [NAME ...] [--list] [--core] [--tests FOLDER] [--no-control] [--limit SECONDS]

One row for each fault: its name, the test that found it, seconds. The exit status is 1 where a fault was not found, or cannot
be planted any more: then give it the text that the code has now."""
import argparse, os, re, secrets, shutil, signal, subprocess, sys, tempfile, time
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'tests'/'support'))
from harness import _kill_all

KEEP_OUT = '.git', '.venv*', 'venv*', '__pycache__', '.pytest_cache', '.hypothesis', '*.egg-info', 'build', 'dist', '_proc', '_docs'
MARK = 'FASTDIST_PLANTED'  # every process of a trial carries it, and so do its children, whatever session they move to

# `old` stands in exactly one place of fastdist/, whichever module that is
Fault = namedtuple('Fault', 'name promise breaks old new tests')
FAULTS = [Fault(*o) for o in [
    # Doors: nothing that comes from outside of the job is run
    ('signature-unchecked', 'P2', "a signature may be any",
     'if hmac.compare_digest(bytes(signed[:32]), sign(signed[32:], secret, key)): return', 'if True: return',
     ['tests/world/test_doors.py::test_intruder']),
    ('secret-of-nobody', 'P2', "objects are opened whoever has sent them",
     "return pickle.loads(signed_data(flat.cpu().numpy().data, job_secret(), key, get_rank()))", "return pickle.loads(flat.cpu().numpy().data[32:])",
     ['tests/world/test_doors.py::test_intruder']),
    ('listens-everywhere', 'P2', "the launcher's store listens on all interfaces",
     "socket.create_server(('127.0.0.1', port))", "socket.create_server(('', port))",
     ['tests/world/test_doors.py::test_launch']),
    # P1: the numbers of one process
    ('share-cut', 'P1', "shares of a batch are cut to one length: the samples left over are trained by nobody",
     'found[self.rank::self.world_size] or', 'found[self.rank:len(found)-len(found)%self.world_size:self.world_size] or',
     ['tests/data/test_data.py::test_plan']),
    ('padding-counted', 'P1', "samples that only fill up the last slice count, so they count twice",
     'max(0, min(hi, self.n-r*self.slice)-lo)', 'hi-lo',
     ['tests/data/test_data.py::test_plan']),
    ('evaluated-with-what-is-there', 'P1', "a worker without a batch, where parameters are sharded, makes the forward of what it had last",
     'if not self.forwards: self._stand_in()', 'if vars(learn).get("xb") is None: self._stand_in()',
     ['tests/trainer/test_evaluation.py::test_changed_inputs_with_shards']),
    ('evaluated-by-all-counted', 'P1', "a set of one batch, which all workers evaluate, is counted once for each of them",
     'isinstance(self.learn.dl, DistributedDL) and self.learn.dl.world_size > 1', 'isinstance(self.learn.dl, DistributedDL)',
     ['tests/contract/test_numbers.py::test_as_one_process[2]']),
    ('share-of-another-rank', 'P1', "ranks are taken in reverse where a stream is shared out",
     'yield whole,whole[self.rank::self.world_size] or', 'yield whole,whole[self.world_size-1-self.rank::self.world_size] or',
     ['tests/data/test_data.py::test_streams_of_unknown_length']),
    ('text-order-lost', 'P3', "the order of a language model's texts is not put back at the beginning of an epoch",
     'zip(_drawing(learn), rest[\'generators\'])', 'zip(_drawing(learn), ())',
     ['tests/checkpoint/test_resume.py::test_a_language_model']),
    ('resume-repeats-a-batch', 'P3', "a loader that goes on in the middle of an epoch begins one step too early",
     'offset=p.plan.done(p.steps)', 'offset=p.plan.done(max(p.steps-1, 0))',
     ['tests/data/test_data.py::test_goes_on_in_the_middle[fastai-True]']),
    ('order-not-shared', 'P1', "the loader's own generator is not set to rank 0's: workers that nobody seeded shuffle differently",
     '        set_generator_states(gens, states)\n', '',
     ['tests/contract/test_every_loader.py::test_each_sample_once[3]']),
    ('same-augmentations', 'P1', "dropout and augmentations of a fit are the same in all workers",
     'seed = seed_of(self.rank, random.getstate()', 'seed = seed_of(0, random.getstate()',
     ['tests/data/test_loaders.py::test_a_fit_draws_the_same_after_the_same_seed']),
    ('shares-weigh-alike', 'P1', "gradients of unequal shares of a batch get equal weights",
     'get_world_size()*self.samples/self.total if', '1. if',
     ['tests/contract/test_training.py::test_as_one_process[2]']),
    ('callbacks-draw-apart', 'P1', "what callbacks draw in a fit is drawn from each worker's own stream",
     'if event_name not in _local_events: random.exit()', 'pass',
     ['tests/trainer/test_random_streams.py::test_one_stream[2]']),
    ('second-backward-local', 'P1', "the gradients of a second backward pass in a step are not averaged",
     'if not (own and self._by_ddp()): return self._average_all()', 'if not (own and self._by_ddp()): return',
     ['tests/contract/test_training.py::test_as_one_process[2]']),
    ('unfrozen-not-synced', 'P1', "gradients of parameters that are unfrozen within a fit are not averaged",
     'if self.ddp is not None and trained==self.trained: return', 'if self.ddp is not None: return',
     ['tests/contract/test_training.py::test_as_one_process[2]']),
    ('unknown-loss-by-shares', 'P1', "a loss of the user's, of which nothing is known, is computed for each share",
     'small = nbytes <= _gathered_at_most and', 'small = False and',
     ['tests/contract/test_training.py::test_as_one_process[2]']),
    ('accumulation-by-batches', 'P1', "an accumulated gradient is divided by the number of batches, not of samples",
     'self.first/divisor(self.total)', '1/self.n',
     ['tests/callbacks/test_accumulate.py::test_steps_are_a_large_batch[2-13-6-5-plain]']),
    ('local-batch-norm', 'P1', "batch norm takes its statistics from the worker's own share",
     '        x = x.clone()\n        dist.all_reduce(x)\n', '        x = x.clone()\n',
     ['tests/contract/test_training.py::test_as_one_process[2]']),
    ('mean-of-means', 'P1', "a metric is the mean of the workers' means, however many samples each had",
     'vs = [getattr(m, o) for m,ns in zip(mets, names) for o in ns]', 'vs = [o for m in mets for o in (m.total/max(m.count, 1),1)]',
     ['tests/contract/test_numbers.py::test_as_one_process[2]']),
    ('predictions-by-rank', 'P1', "predictions come worker after worker, not in the order of the data set",
     'return [p[i] for i in range(max(map(len, parts))) for p in parts if i < len(p)]', 'return [o for p in parts for o in p]',
     ['tests/contract/test_numbers.py::test_as_one_process[2]']),
    ('predictions-by-worker', 'P1', "predictions come in the order of the workers, and not of the data set",
     '(map(interleave, zip(*parts)) if rows else in_turn(parts))', '[b for part in parts for b in part]',
     ['tests/contract/test_numbers.py::test_as_one_process[2]']),
    ('callbacks-of-the-start', 'P1', "the callbacks of an event are those that the learner had when the fit began",
     "if self.known!=now: self", "if self.known is None: self",
     ['tests/trainer/test_learner.py::test_callbacks_that_change_in_a_fit[2]']),
    ('divergence-unseen', 'P1', "workers whose weights have diverged go on",
     'if not n*ww-w*w > (w*self.rounding)**2+1e-12: return', 'return',
     ['tests/trainer/test_random_streams.py::test_own_generators']),
    ('failed-gradients-stay', 'P1', "gradients that a fit has left in one worker, when it failed, go into a step of the next one",
     '    else: self.strategy.drop_grads()\n', '',
     ['tests/fault/test_caught.py::test_gradients_of_a_fit_that_has_failed[ddp-at0-False]']),
    # P2: never a silent hang
    ('watchdog-never-fires', 'P2', "the watchdog does not go by the limit of the context",
     'for o in reversed(self.limits) if o is not None), None)', 'for o in self.limits[1:] if o is not None), None)',
     ['tests/fault/test_faults.py::test_the_one_that_is_late_ends_too']),
    ('caught-and-kept', 'P2', "an exception that one worker alone catches inside of the context is told to nobody",
     '        with _scope(m): yield\n    finally: m.in_part = False', '        yield\n    finally: m.in_part = False',
     ['tests/fault/test_caught.py::test_by_one[fit-validate]']),
    ('error-kept-to-itself', 'P2', "a worker that fails does not tell the others what it was",
     '        self.write(self.key, f)\n        if self.all_ended(begun): self.agreed += 1\n        else:\n            self.break_off(f)\n            self.over = True\n',
     '        self.over = True\n',
     ['tests/fault/test_faults.py::test_reaches_all[collective]']),
    ('wrong-worker-blamed', 'P2', "the launcher blames another worker than the one that failed first",
     'return rank,failures.get(rank),cause', 'return max(failures),failures.get(rank),cause',
     ['tests/promises/test_p2_no_hang.py::test_ends_at_once[leaves_last]']),
    ('exit-status-lost', 'P2', "fastdist launch ends with 0 whatever its workers end with",
     'patch_environment(**env): status = _run(', 'patch_environment(**env): status = 0*_run(',
     ['tests/launch/test_launch.py::test_exit_status']),
    ('file-left', 'P5', "fastdist check leaves its trial file in the user's folder",
     "prefix='.fastdist-check-')", "prefix='.fastdist-check-', delete=False)",
     ['tests/launch/test_check.py::test_good']),
    ('cancel-of-one-alone', 'P2', "a Cancel exception counts only where all workers raise it; the others go on by themselves",
     "AsyncReduce(torch.tensor([n], device=self.device), 'max')", "AsyncReduce(torch.tensor([n], device=self.device), 'min')",
     ['tests/fault/test_decisions.py::test_cancelled_by_some_of_two[outside-subset0]']),
    ('left-without-a-word', 'P2', "a worker leaves a context while others train in it",
     "leave_together('the end of distrib_ctx')", "noop('the end of distrib_ctx')",
     ['tests/fault/test_one_does_otherwise.py::test_makes_other_calls[2-leaves-None]']),
    ('one-ends-alone', 'P2', "the others do not hear that a callback of one worker has ended the fit",
     '*(self.pending is o for o in ending[1:])', '*(False for o in ending[1:])',
     ['tests/fault/test_decisions.py::test_one_ends_a_loop_unasked[2]']),
    ('unlike-callbacks', 'P1', "one worker clips gradients, and the others do not",
     '            _check_consistent(every)\n', '',
     ['tests/fault/test_one_does_otherwise.py::test_has_a_callback_that_changes_training[3-clips]']),
    ('unlike-learning-rates', 'P1', "one worker steps by another learning rate",
     'if n*int(hh)!=int(h)**2:', 'if False:',
     ['tests/fault/test_one_does_otherwise.py::test_steps_by_other_numbers[2-lr-None]']),
    ('undone-before-told', 'P2', "a worker in which a context cannot begin undoes it, by messages, before the others hear of it",
     'if not self.in_context: same_call(', 'if False: same_call(',
     ['tests/fault/test_begins_and_ends.py::test_one_fails_as_it_begins[2-on_learner-to_distributed-zero1]']),
    ('ctrl-c-dropped', 'P2', "a Ctrl-C that comes while a context begins is dropped",
     'if self.pop(): raise KeyboardInterrupt\n', 'self.pop()\n',
     ['tests/fault/test_begins_and_ends.py::test_ctrl_c_as_it_begins[3-on_learner-zero2]']),
    ('waits-for-the-dead', 'P2', "who survives waits for one that was killed, to gather its shards",
     "def lacks(): return store.check(['away']) or some_ended()", 'def lacks(): return False',
     ['tests/fault/test_begins_and_ends.py::test_nobody_waits_for_one_that_was_killed']),
    ('used-out-of-step', 'P2', "workers that have failed by themselves at different places go on with the same process group",
     "at,here = f'{len(self.limits)}/{begun}',", "at,here = f'{len(self.limits)}',",
     ['tests/fault/test_begins_and_ends.py::test_all_fail_at_different_places[2-zero1-context]']),
    ('other-state-gathered', 'P2', "what optimizers remember after a failure in the first step is gathered, though some have not got as far",
     'if group is not False and strategy.shards_state:', 'if group is None and strategy.shards_state:',
     ['tests/fault/test_begins_and_ends.py::test_one_fails_within_a_step[3-zero2]']),
    ('caught-elsewhere', 'P2', "a fit that has failed in all workers, at different places, is caught, and they go on out of step",
     '    f = self.broken\n    if f is None: return\n', '    f = self.broken\n    if f is None or self.is_own(f): return\n',
     ['tests/fault/test_begins_and_ends.py::test_all_fail_at_different_places[3-ddp-caught]']),
    # P3: nothing lost
    ('own-shard-saved', 'P3', "learn.save writes rank 0's shard of the parameters as if it were the whole",
     'o = o.full_tensor() if is_dtensor(o) else o\n', 'o = o.to_local() if is_dtensor(o) else o\n',
     ['tests/contract/test_every_strategy.py::test_models_and_files[fsdp-3]']),
    ('saved-in-place', 'P3', "learn.save writes over the last checkpoint, which is lost if the process is killed meanwhile",
     'torch.save(state, tmp, pickle_protocol=pickle_protocol, **kwargs)\n        os.replace(tmp, file)', 'torch.save(state, file, pickle_protocol=pickle_protocol, **kwargs)',
     ['tests/trainer/test_learner.py::test_save_that_fails_leaves_the_last_file[2]']),
    ('part-not-awaited', 'P3', "rank 0 makes a checkpoint of its own files, while the others still write",
     "for part in [draft/f'part-{r}.json' for r in range(self.n)]:", "for part in [draft/'part-0.json']:",
     ['tests/contract/test_goes_on.py::test_one_worker_fails']),
    ('other-rows-read', 'P3', "a worker of another number of workers reads rows from the first on, in place of its own",
     'o[max(start-at, 0):max(end-at, 0)] for', 'o[:max(end-max(start, at), 0)] for',
     ['tests/contract/test_goes_on.py::test_at_every_batch']),
    ('damage-loaded', 'P3', "a file that has changed since it was written, and has its size, is loaded",
     'if now!=want: raise', 'if not now: raise',
     ['tests/checkpoint/test_damage.py::test_none_of_a_hundred_is_loaded']),
    ('waiting-gradients-lost', 'P3', "it is saved at the end of an epoch where batches wait for others of their step, whose gradients are lost",
     'if fit.due and fit.stepped and (done', 'if fit.due and (done',
     ['tests/checkpoint/test_resume.py::test_what_waits_for_a_step[ddp]']),
    # P4: no tax
    ('message-per-worker', 'P4', "when a context begins each worker sends its own message to all others",
     '    same = same_text(repr((kinds,values,checksums(here))))\n',
     '    same = same_text(repr((kinds,values,checksums(here))))\n    for r in range(dist.get_world_size()): dist.broadcast(torch.zeros(1), r)\n',
     ['tests/contract/test_messages.py::test_messages']),
    ('bar-waits', 'P4', "the progress bar waits in each step for the GPU to compute the loss",
     '    if device_of(self.learn) is None or self.learn.loss.is_cpu: return _show(self)\n', '    return _show(self)\n',
     ['tests/promises/test_gpus.py::test_an_average_that_nobody_waits_for']),
    ('average-waits', 'P4', "fastai's average of the losses waits in each step for the GPU",
     '    if learn.loss.is_cpu or device_of(learn) is None: return _accumulate(self, learn)\n', '    return _accumulate(self, learn)\n',
     ['tests/promises/test_gpus.py::test_the_host_waits_for_no_kernel_of_a_step[ddp-plain-24-False]']),
    ('waits-in-each-step', 'P4', "whether Ctrl-C was pressed is asked by a collective of its own in each step, which all wait for",
     'if self.step.ends is not None: self.decisions', 'if self.decisions.agree() or self.step.ends is not None: self.decisions',
     ['tests/contract/test_messages.py::test_messages']),
    ('collective-in-each-validation-batch', 'P4', "the loss of each validation batch is added up over the workers at once",
     'self.totals.add_batch(rows=self.by_rows)',
     'torch.distributed.all_reduce(self.learn.loss.detach().clone()); self.totals.add_batch(rows=self.by_rows)',
     ['tests/contract/test_messages.py::test_messages']),
    # P5: leaves no trace
    ('callbacks-left', 'P5', "callbacks that a context adds stay on the learner",
     'undo.callback(self.learn.remove_cb, cb)', 'undo.callback(noop)',
     ['tests/contract/test_no_trace.py::test_ends']),
    ('not-undone-after-an-error', 'P5', "a context that an exception ends is not undone",
     'with nullcontext() if broken or cb.undo is None else scope(cb.settings.watchdog): self.detach_distributed()', 'pass',
     ['tests/contract/test_no_trace.py::test_ends']),
    ('random-stream-left', 'P5', "after an error in a fit the worker's own random numbers go on in the script",
     '_go_to(*self.shared)', 'pass',
     ['tests/contract/test_no_trace.py::test_ends']),
    ('logger-left', 'P5', "after a context workers other than rank 0 log nothing any more",
     'undo.enter_context(learn.no_logging())', 'learn.logger = noop',
     ['tests/contract/test_no_trace.py::test_ends']),
    ('optimizer-state-lost', 'P5', "the optimizer's state is dropped when zero1 ends, in place of being put together",
     'else: self.gather(group)', 'else: self.opt.clear_state()',
     ['tests/contract/test_every_strategy.py::test_models_and_files[zero1-2]']),
    # P6: one script
    ('tasks-of-the-job', 'P6', "under Slurm the number of nodes is taken from the job, not from the step",
     "_first_int('SLURM_STEP_NUM_NODES', 'SLURM_NNODES')", "_first_int('SLURM_NNODES', 'SLURM_STEP_NUM_NODES')",
     ['tests/world/test_start.py::test_slurm[step]']),
    ('an-earlier-start-replies', 'P3', "a worker that is started again takes the name of the first start for that of this one",
     'mine = f"start/{hall.add(\'drawn\', 1)}"', 'mine = f"start/{min(1, hall.add(\'drawn\', 1))}"',
     ['tests/world/test_start.py::test_agents_that_count_differently']),
    ('threads-of-accelerate', 'P6', "torch's threads are as many as Accelerate sets, not as the launcher or the script has",
     'finally: torch.set_num_threads(n)', 'finally: n',
     ['tests/world/test_care.py::test_threads']),
    ('rank-in-the-url-unread', 'P6', "the rank and the size that tcp://host:port?rank=..&world_size=.. says are not read",
     "said.get('rank') if rank is None else rank, said.get('world_size') if size is None else size", 'rank, size',
     ['tests/world/test_start.py::test_tcp_in_the_url']),
    ('launcher-over-url', 'P6', "workers of a launcher meet where it says, though an init_method was given",
     'if (init_method,rank,world_size)!=(None,None,None): return', "if (init_method,rank,world_size)!=(None,None,None) and e.launcher=='none': return",
     ['tests/launch/test_config.py::test_two_machines']),
    ('rank0-not-first', 'P6', "rank0_first calls the function in all workers at once",
     "        _follow(store, key, first, f'rank0_first({_name(func)})')\n        return func(*args, **kwargs)",
     '        return func(*args, **kwargs)',
     ['tests/world/test_start.py::test_rank0_first_without_a_group[False]']),
    ('own-object-first', 'P6', "all_gather_list begins with the worker's own object, not with rank 0's",
     'return [self.load(p, i) for i,p in enumerate(self.parts())]',
     'return (lambda o: o[self.me:]+o[:self.me])([self.load(p, i) for i,p in enumerate(self.parts())])',
     ['tests/world/test_start.py::test_tcp[False-2]']),
    ('prints-cut', 'P6', "ends of lines that workers print do not come into the notebook",
     "if kind=='stream': self.show(*args)", "if kind=='stream': self.show(*args) if args[1].strip() else None",
     ['tests/launch/test_launch_notebook.py::test_script']),
    ('interface-unchecked', 'P6', "fastdist check says ready although the workers cannot join a process group",
     "    if len({o['backend'].partition(':')[0] for o in every})==1:", "    if False:",
     ['tests/launch/test_check.py::test_wrong_interface']),
    ('state-left-on-the-cpu', 'P6', "what an optimizer remembers of a parameter that is a number does not follow it to the GPU",
     'k not in shaped]', 'True]',
     ['tests/promises/test_gpus.py::test_after_a_context[opt1]']),
    # P7: no silent argument
    ('argument-swallowed', 'P7', "an argument of Accelerate's that is not accepted is taken, and does nothing",
     '_check_names(given)\n    for', 'given = {k:v for k,v in given.items() if k in ARGUMENTS}\n    for',
     ['tests/promises/test_p7_arguments.py::test_no_argument_of_accelerates_is_swallowed']),
    ('error-without-value', 'P7', "errors of arguments do not say which value is not accepted",
     '{arg}={short_repr(value)} is not accepted', '{arg} is not accepted',
     ['tests/promises/test_p7_arguments.py::test_refused']),
    ('config-key-ignored', 'P7', "split_batches in a config for fastdist train has no effect",
     'sync_bn=c.sync_bn, split_batches=c.split_batches,', 'sync_bn=c.sync_bn,',
     ['tests/launch/test_config.py::test_number_of_workers_changes_nothing']),
    ('learning-rate-ignored', 'P7', "learning_rate in a config for fastdist train has no effect",
     'lr = () if c.learning_rate is None else (c.learning_rate,)', 'lr = ()',
     ['tests/launch/test_config.py::test_tables']),
    # P8: clean import
    ('import-order', 'P8', "fastai.distributed, imported after fastdist, takes fastdist's methods away",
     'import fastai.distributed # before', 'pass # before',
     ['tests/promises/test_p8_import.py::test_either_order']),
    ('torch-in-the-command-line', 'P8', "fastdist train imports torch before it has read the config: seconds, to say that a key is wrong",
     'from .machine import is_worker, nearest, plural\n', 'from .machine import is_worker, nearest, plural\nimport torch\n',
     ['tests/launch/test_config.py::test_wrong_config_at_once']),
    ('thread-at-import', 'P8', "an import starts a thread",
     'World.begin_hooks.append(monitor)\n', 'World.begin_hooks.append(monitor)\nimport threading,time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n',
     ['tests/promises/test_p8_import.py::test_either_order']),
    ('port-at-import', 'P8', "an import opens a port: the store of a process alone is a TCPStore, and made at once",
     '_start_timeout = 600 #', "_alone = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n_start_timeout = 600 #",
     ['tests/promises/test_p8_import.py::test_either_order']),
]]


def copy(tests=None):
    "The tree in a new folder, with `tests` in the place of its own tests"
    to = Path(tempfile.mkdtemp(prefix='planted'))/'tree'  # not in the checkout: what is imported must be the copy
    shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*KEEP_OUT))
    if tests:
        shutil.rmtree(to/'tests')
        shutil.copytree(tests, to/'tests', ignore=shutil.ignore_patterns(*KEEP_OUT))
    return to


def place(fault, root):
    "The file of the tree at `root` that the fault goes into; a `ValueError` says why it cannot be"
    found = {f: f.read_text(encoding='utf-8').count(fault.old) for f in sorted((root/'fastdist').rglob('*.py'))}
    found = {f: n for f, n in found.items() if n}
    if sum(found.values()) != 1:
        at = ', '.join(f'{n} in {f.relative_to(root)}' for f, n in found.items()) or 'none'
        raise ValueError(f'{fault.name} cannot be planted: {fault.old!r} has to stand in one place of fastdist/, and there are: {at}')
    return next(iter(found))


def plant(fault, root):
    "Put the fault into the tree at `root`"
    file = place(fault, root)
    file.write_text(file.read_text(encoding='utf-8').replace(fault.old, fault.new), encoding='utf-8')
    compile(file.read_text(encoding='utf-8'), str(file), 'exec')  # a fault that no Python can be is found by everything


def run(args, root, limit):
    "Run Python in the tree at `root`, within `limit` seconds: (exit status or `None`, what it printed)"
    mark = secrets.token_hex(8)
    env = {k: v for k, v in os.environ.items() if not k.startswith(('PYTEST_', 'COV_'))}
    env.update({MARK: mark, 'PYTHONPATH': str(root), 'PYTHONUNBUFFERED': '1', 'COLUMNS': '300', 'TMPDIR': str(root.parent)})
    with open(root.parent/'output', 'w+', errors='replace') as out:
        proc = subprocess.Popen([sys.executable, *args], cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                start_new_session=True)
        try: status = proc.wait(limit)
        except subprocess.TimeoutExpired: status = None
        finally:
            _kill_all(mark, proc.pid, MARK)
            proc.wait()
        out.seek(0)
        return status, out.read()


def verdict(status, text):
    "(was the fault found?, the node id of the test that did it, or why it is not known)"
    failed = re.search(r'^(?:FAILED|ERROR) (\S+?\.py(?:::\w+(?:\[.*?\](?= - |\s*$))?)?)', text, re.M)
    if failed: return True, failed[1]
    begun = re.findall(r'^(tests/\S+\.py::\w+(?:\[.*?\])?) *(?!.*(?:PASSED|SKIPPED|XFAIL))', text, re.M)
    # pytest-timeout ends the process without a summary; the last test that had begun is the one that hung
    if (status is None or '+ Timeout +' in text) and begun: return True, f'{begun[-1]} (hangs)'
    if status == 0: return False, ''
    return None, f'pytest ended with {status}: ' + ' / '.join(text.strip().splitlines()[-3:])


def trial(fault, a, tests):
    "Plant `fault`, or nothing, in a copy and run the tests there: (found, by what, seconds)"
    root, begin = copy(a.tests), time.monotonic()
    try:
        if fault: plant(fault, root)
        status, text = run(['-c', 'import os; os.chdir("/"); import fastdist; print(fastdist.__file__)'], root, 60)
        if text.strip() != str(root/'fastdist'/'__init__.py'): raise ValueError(f'not the copy in {root} is imported, but {text.strip()}')
        select = ['-m', 'core', 'tests'] if a.core else ['-n', '0', *tests] if len(tests) < 4 else tests
        # -v, and not -q: the test that hung is the last that it names
        status, text = run(['-m', 'pytest', '-x', '-v', '-p', 'no:cacheprovider', '--tb=short', *select], root, a.limit)
        found, by = verdict(status, text)
        if found is not False and a.keep: Path(a.keep).joinpath(f'{fault.name if fault else "control"}.txt').write_text(text)
        return found, by, time.monotonic()-begin
    finally: shutil.rmtree(root.parent, ignore_errors=True)


def main():
    "Plant and report; the exit status"
    p = argparse.ArgumentParser(usage=__doc__.partition('\n\n')[2].partition('\n\n')[0].strip(), description=__doc__.partition('\n')[0])
    add = p.add_argument
    add('names', nargs='*', metavar='NAME', help='faults; by default all')
    add('--list', action='store_true', help='show the faults, and end')
    add('--core', action='store_true', help='run all tests marked core, rather than those that the fault names')
    add('--tests', metavar='FOLDER', help="tests in the place of the tree's own")
    add('--no-control', action='store_true', help='do not run the tests without a fault first')
    add('--limit', type=float, default=420, metavar='SECONDS', help='for one fault (default: 420)')
    add('--keep', metavar='FOLDER', help='where to write what pytest printed')
    a = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends a trial and removes its copy
    unknown = set(a.names)-{o.name for o in FAULTS}
    if unknown: p.error(f"no such fault: {', '.join(sorted(unknown))}; --list shows those that there are")
    faults = [o for o in FAULTS if not a.names or o.name in a.names]
    if a.list:
        for o in faults: print(f'{o.name:36} {o.promise}  {o.breaks}')
        return 0
    if a.keep: Path(a.keep).mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    if not a.no_control:
        tests = list(dict.fromkeys(t for o in faults for t in o.tests))
        found, by, secs = trial(None, argparse.Namespace(**{**vars(a), 'limit': a.limit*10}), tests)
        print(f'{"no fault":36} {"all pass" if found is False else by}  {secs:.0f} s', flush=True)
        if found is not False: return 1
    missed = []
    for o in faults:
        try: found, by, secs = trial(o, a, o.tests)
        except (ValueError, SyntaxError) as e: found, by, secs = None, str(e), 0
        if not found: missed.append(o.name)
        shown = by if found else 'NOT FOUND' if found is False else f'ERROR: {by}'
        print(f'{o.name:36} {shown}  {secs:.0f} s', flush=True)
    not_found = f"; not: {', '.join(missed)}" if missed else ''
    print(f'{len(faults)-len(missed)} of {len(faults)} faults found, in {time.monotonic()-begin:.0f} s{not_found}')
    return 1 if missed else 0


if __name__ == '__main__': sys.exit(main())
