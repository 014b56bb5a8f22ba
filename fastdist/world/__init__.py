"""Who this process is, and how processes start, wait, communicate and fail together: all that a loop of one's own needs"""
from ..lazy import lazy_names

__getattr__,__all__ = lazy_names(__name__, {
    '.state': 'World current_world get_default_group',
    '.ranks': (
        'check_rank get_backend get_device get_launcher get_local_rank get_local_world_size '
        'get_node_rank get_rank get_world_size is_master use_cpu'),
    '.store': 'KeyValueStore',
    '.rendezvous': 'Start infer_init_method',
    '.errors': 'RemoteError',
    '.process_group': 'call_main distributed_init init_group setup_distrib teardown_distrib world_store',
    '..comm.objects': 'OutOfStep agree all_gather_list broadcast_object node_group print_in_order rank0_only rank_only',
    '..comm.reduce': 'all_gather_tensors all_reduce all_reduce_dict',
    '..comm.rank0': 'rank0_first rank0_read',
    '..fault.supervisor': 'fail_together'})
