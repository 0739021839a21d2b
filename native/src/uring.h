/* uring.h: what uring.c and uring_memory.c share. Private.
 *
 * The header of the kernel's interface may be missing or old on the machine that builds: without it
 * the backend says -ENOSYS, and what an old one does not name is left out.
 */
#ifndef TM_URING_H
#define TM_URING_H

#include "engine.h"

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

/* The feature that tells a kernel of 5.6, the first with IORING_OP_READ and IORING_OP_WRITE. */
#ifdef IORING_FEAT_RW_CUR_POS
#define TM_HAVE_URING 1

/* Buffers that are registered one by one, as transfers touch them ([Note: slabs]). All under mutex. */
typedef struct {
  tm_range range;
  uint64_t slab_bytes;
  uint8_t *slabs; /* a slab_state each */
} uring_range;

typedef struct {
  pthread_mutex_t mutex;
  int ring_fd;
  bool has_table; /* the kernel keeps a table of buffers for this ring */
  int32_t refusal;
  uint64_t bytes, transfers;
  uring_range ranges[TM_MAX_RANGES];
} uring_memory;

void tm_uring_memory_init(uring_memory *memory, int ring_fd, uint32_t features);
void tm_uring_memory_close(uring_memory *memory);
void tm_uring_memory_release(uring_memory *memory); /* only the process's own copies */
int tm_uring_memory_add(uring_memory *memory, void *base, uint64_t length);
void tm_uring_memory_remove(uring_memory *memory, void *base);
void tm_uring_memory_count(uring_memory *memory, tm_memory_stats *total);
/* The number of the registered buffer that holds the transfer's memory, or -1. */
int tm_uring_memory_find(uring_memory *memory, const tm_transfer *transfer);

#endif
#endif
