/* uring_memory.c: registered buffers of an io_uring.
 *
 * A transfer in registered memory skips looking up and pinning its pages. Registering pins, and so
 * populates, memory; an arena is a budget of which a run may use little. Hence:
 *
 * [Note: slabs] A range is divided into slabs, each a buffer of its own that is registered when a
 * transfer first lies in it: what is pinned is what transfers use, rounded up to slabs. A transfer
 * across the border of two slabs goes the ordinary way (one in sixteen of 2 MiB at slabs of 32 MiB).
 * The first slab that the kernel refuses (RLIMIT_MEMLOCK) ends the attempts for this ring.
 *
 * [Note: stale pins] A registered buffer is pages, not addresses: were the memory unmapped and the
 * address used again, transfers would reach the old pages. So remove() must come before munmap, and
 * teardown unregisters by itself: a forked child's copy of the descriptor may keep the ring alive.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "uring.h"

#ifdef TM_HAVE_URING

enum { MAX_SLABS = 2048, NUM_SLOTS = TM_MAX_RANGES * MAX_SLABS }; /* the kernel takes 16384 */
#define SLAB_BYTES ((uint64_t)32 << 20)
#define MAX_SLAB_BYTES ((uint64_t)1 << 30) /* the kernel's limit */

enum slab_state { SLAB_UNTRIED = 0, SLAB_REGISTERED = 1 };

/* IORING_FEAT_MIN_TIMEOUT, of 6.12. Before that release a registered buffer on transparent huge
 * pages was kept as 4 KiB pieces, and a drive with few segments per request then gets smaller
 * requests than by the ordinary way, which merges neighbours. */
enum { FEATURE_OF_6_12 = 1u << 15 };

#ifdef IORING_RSRC_REGISTER_SPARSE

static int register_call(int ring_fd, unsigned opcode, void *argument, unsigned size) {
  return syscall(SYS_io_uring_register, ring_fd, opcode, argument, size) < 0 ? -errno : 0;
}

static int make_table(int ring_fd) {
  struct io_uring_rsrc_register table = {.nr = NUM_SLOTS, .flags = IORING_RSRC_REGISTER_SPARSE};
  return register_call(ring_fd, IORING_REGISTER_BUFFERS2, &table, sizeof table);
}

static int set_slot(int ring_fd, uint32_t slot, void *base, uint64_t length) {
  struct iovec buffer = {.iov_base = base, .iov_len = length};
  struct io_uring_rsrc_update2 update = {
      .offset = slot, .data = (uint64_t)(uintptr_t)&buffer, .nr = 1};
  /* Returns how many were set. */
  long done = syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_BUFFERS_UPDATE, &update,
                      sizeof update);
  return done < 0 ? -errno : 0;
}

static void drop_table(int ring_fd) {
  register_call(ring_fd, IORING_UNREGISTER_BUFFERS, NULL, 0);
}

#else

static int make_table(int ring_fd) { return -ENOSYS; }
static int set_slot(int ring_fd, uint32_t slot, void *base, uint64_t length) { return -ENOSYS; }
static void drop_table(int ring_fd) {}

#endif

void tm_uring_memory_init(uring_memory *memory, int ring_fd, uint32_t features) {
  pthread_mutex_init(&memory->mutex, NULL);
  memory->ring_fd = ring_fd;
  memory->refusal = features & FEATURE_OF_6_12 ? 0 : -ENOSYS;
}

void tm_uring_memory_release(uring_memory *memory) {
  for (uint32_t i = 0; i < TM_MAX_RANGES; i++) free(memory->ranges[i].slabs);
}

void tm_uring_memory_close(uring_memory *memory) {
  if (memory->has_table) drop_table(memory->ring_fd);
  pthread_mutex_destroy(&memory->mutex);
  tm_uring_memory_release(memory);
}

static uring_range *find_range(uring_memory *memory, const void *base) {
  for (uint32_t i = 0; i < TM_MAX_RANGES; i++)
    if (memory->ranges[i].range.base == base) return &memory->ranges[i];
  return NULL;
}

static uint64_t slab_length(const uring_range *range, uint64_t slab) {
  uint64_t left = range->range.length - slab * range->slab_bytes;
  return left < range->slab_bytes ? left : range->slab_bytes;
}

static uint64_t num_slabs(const uring_range *range) {
  return (range->range.length - 1) / range->slab_bytes + 1;
}

static uint32_t slot_of(const uring_memory *memory, const uring_range *range, uint64_t slab) {
  return (uint32_t)(range - memory->ranges) * MAX_SLABS + (uint32_t)slab;
}

int tm_uring_memory_add(uring_memory *memory, void *base, uint64_t length) {
  int rc = 0;
  pthread_mutex_lock(&memory->mutex);
  uring_range *range = find_range(memory, NULL);
  if (!range) rc = -ENOSPC;
  if (!rc && !memory->has_table && !memory->refusal) {
    memory->refusal = make_table(memory->ring_fd);
    memory->has_table = !memory->refusal;
  }
  if (!rc) rc = memory->refusal;
  if (rc) goto out;
  uring_range made = {.range = {base, length}, .slab_bytes = SLAB_BYTES};
  while (num_slabs(&made) > MAX_SLABS) made.slab_bytes *= 2;
  if (made.slab_bytes > MAX_SLAB_BYTES) rc = -ENOSPC;
  if (!rc && !(made.slabs = calloc(num_slabs(&made), 1))) rc = -ENOMEM;
  if (!rc) *range = made;
out:
  pthread_mutex_unlock(&memory->mutex);
  return rc;
}

void tm_uring_memory_remove(uring_memory *memory, void *base) {
  pthread_mutex_lock(&memory->mutex);
  uring_range *range = find_range(memory, base);
  for (uint64_t slab = 0; range && slab < num_slabs(range); slab++) {
    if (range->slabs[slab] != SLAB_REGISTERED) continue;
    set_slot(memory->ring_fd, slot_of(memory, range, slab), NULL, 0);
    memory->bytes -= slab_length(range, slab);
  }
  if (range) {
    free(range->slabs);
    *range = (uring_range){0};
  }
  pthread_mutex_unlock(&memory->mutex);
}

void tm_uring_memory_count(uring_memory *memory, tm_memory_stats *total) {
  pthread_mutex_lock(&memory->mutex);
  total->bytes += memory->bytes;
  total->chunks += memory->transfers;
  if (memory->refusal) total->refusal = memory->refusal;
  pthread_mutex_unlock(&memory->mutex);
}

/* Whether the slab is registered, now or by this call. Under the mutex. */
static bool have_slab(uring_memory *memory, uring_range *range, uint64_t slab) {
  if (range->slabs[slab] == SLAB_REGISTERED) return true;
  if (memory->refusal) return false;
  uint64_t length = slab_length(range, slab);
  memory->refusal = set_slot(memory->ring_fd, slot_of(memory, range, slab),
                             range->range.base + slab * range->slab_bytes, length);
  if (memory->refusal) return false;
  range->slabs[slab] = SLAB_REGISTERED;
  memory->bytes += length;
  return true;
}

int tm_uring_memory_find(uring_memory *memory, const tm_transfer *transfer) {
  int found = -1;
  uintptr_t start = (uintptr_t)transfer->buffer;
  pthread_mutex_lock(&memory->mutex);
  for (uint32_t i = 0; i < TM_MAX_RANGES && memory->has_table; i++) {
    uring_range *range = &memory->ranges[i];
    uintptr_t base = (uintptr_t)range->range.base;
    if (!base || start < base || start - base >= range->range.length) continue;
    uint64_t slab = (start - base) / range->slab_bytes;
    uint64_t within = (start - base) % range->slab_bytes;
    if (within + transfer->length <= slab_length(range, slab) && have_slab(memory, range, slab)) {
      found = (int)slot_of(memory, range, slab);
      memory->transfers++;
    }
    break;
  }
  pthread_mutex_unlock(&memory->mutex);
  return found;
}

#else
typedef int tm_uring_memory_is_empty; /* C wants a declaration in every file */
#endif
