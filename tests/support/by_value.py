"What cloudpickle sends of tests, with the files that it came from: tracebacks name them (cloudpickle 3.1.3 leaves them out)"
import io, marshal, types

import cloudpickle


class Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType): return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


def dumps(obj):
    file = io.BytesIO()
    Pickler(file).dump(obj)
    return file.getvalue()
