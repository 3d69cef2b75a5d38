"""The part of sgl_kernel that SGLang uses on a CPU with the torch_native attention backend.

Place in the data flow: tools/sglang_cpu_env.sh copies it into the site-packages of its environment, since sgl_kernel
has no CPU package for every machine. SGLang imports many kernels by name and calls one. Refuses every other call.
"""


def assign_req_to_token_pool_cpu(rows_B, table_RS, starts_B, ends_B, slots, row_length):
    """Write the cache slots of new tokens into the requests' rows of the table of slots, in place.

    Args:
        rows_B: row of each request.
        table_RS: cache slot of every token: rows of requests, columns of positions.
        starts_B: first position to fill, per request.
        ends_B: the position behind the last one to fill, per request.
        slots: the slots of all requests, one after the other.
        row_length: columns of the table; known from the table, not used.
    """
    used = 0
    for row, start, end in zip(rows_B.tolist(), starts_B.tolist(), ends_B.tolist(), strict=True):
        table_RS[row, start:end] = slots[used : used + end - start].to(table_RS.dtype)
        used += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(
            f"sgl_kernel.{name} is not in this CPU environment (tools/sglang_cpu_env.sh); start the server with "
            "--device cpu --attention-backend torch_native --grammar-backend none, or use a machine with a GPU"
        )

    return missing
