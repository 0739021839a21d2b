/* Choice of the variant; splitting and merging of masters. */
#include <errno.h>

#include "kernels.h"

#if TM_X86
#include <cpuid.h>

/* Not every compiler's __builtin_cpu_supports knows f16c. */
static int tm_has_f16c(void) {
  uint32_t eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}
#endif

uint32_t tm_isa_best(void) {
#if TM_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return TM_ISA_AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && tm_has_f16c())
    return TM_ISA_AVX2;
#endif
  return TM_ISA_PLAIN;
}

int tm_isa_check(uint32_t isa) {
  if (isa > TM_ISA_AVX512) return -EINVAL;
  return isa > tm_isa_best() ? -ENOTSUP : 0;
}

typedef struct {
  float *master;
  uint16_t *hi;
  int16_t *lo;
} tm_master_job;

/* Integer work only, so what the compiler makes of these loops for each target has the same bits. */

TM_INLINE void tm_split_loop(const float *restrict master, uint16_t *restrict hi,
                             int16_t *restrict lo, size_t n) {
  for (size_t i = 0; i < n; i++) tm_split(tm_bits(master[i]), &hi[i], &lo[i]);
}

TM_INLINE void tm_merge_loop(const uint16_t *restrict hi, const int16_t *restrict lo,
                             float *restrict master, size_t n) {
  for (size_t i = 0; i < n; i++) master[i] = tm_from_bits(tm_merge(hi[i], lo[i]));
}

static void tm_split_range(void *context, size_t begin, size_t end) {
  tm_master_job *job = context;
  tm_split_loop(job->master + begin, job->hi + begin, job->lo + begin, end - begin);
}

static void tm_merge_range(void *context, size_t begin, size_t end) {
  tm_master_job *job = context;
  tm_merge_loop(job->hi + begin, job->lo + begin, job->master + begin, end - begin);
}

#if TM_X86
TM_TARGET_AVX2 static void tm_split_range_avx2(void *context, size_t begin, size_t end) {
  tm_master_job *job = context;
  tm_split_loop(job->master + begin, job->hi + begin, job->lo + begin, end - begin);
}

TM_TARGET_AVX2 static void tm_merge_range_avx2(void *context, size_t begin, size_t end) {
  tm_master_job *job = context;
  tm_merge_loop(job->hi + begin, job->lo + begin, job->master + begin, end - begin);
}
#endif

int tm_split_master(tm_pool *pool, size_t n, const float *master, uint16_t *hi, int16_t *lo) {
  tm_master_job job = {(float *)master, hi, lo};
  tm_range_fn range = tm_split_range;
  if (n != 0 && (master == NULL || hi == NULL || lo == NULL)) return -EINVAL;
#if TM_X86
  if (tm_isa_best() >= TM_ISA_AVX2) range = tm_split_range_avx2;
#endif
  tm_pool_run(pool, n, TM_CHUNK, range, &job);
  return 0;
}

int tm_merge_master(tm_pool *pool, size_t n, const uint16_t *hi, const int16_t *lo, float *master) {
  tm_master_job job = {master, (uint16_t *)hi, (int16_t *)lo};
  tm_range_fn range = tm_merge_range;
  if (n != 0 && (master == NULL || hi == NULL || lo == NULL)) return -EINVAL;
#if TM_X86
  if (tm_isa_best() >= TM_ISA_AVX2) range = tm_merge_range_avx2;
#endif
  tm_pool_run(pool, n, TM_CHUNK, range, &job);
  return 0;
}
