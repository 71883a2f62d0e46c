"""What machines boot from, as far as it can be told without one."""

from baltoro.sandbox.guest_disk import kernel_head


def test_a_machine_that_never_boots_holds_the_head_of_a_kernel(tmp_path):
    """Its setup code and a page: a loader that places a kernel reads no more of it."""
    kernel = tmp_path / "vmlinuz"
    for num_sectors, wanted in ((3, 4), (0, 5)):  # 0 means 4 in the boot protocol; one more boots
        data = bytearray(b"k" * 100_000)
        data[0x1F1] = num_sectors
        kernel.write_bytes(data)
        cache = tmp_path / str(num_sectors)
        cache.mkdir()
        head = kernel_head(kernel, cache)
        assert head.read_bytes() == data[: 512 * wanted + 4096]
        assert kernel_head(kernel, cache) == head
