/* 8-bit codes of one block, for the kernels that keep states in them. The format: kernels_codes.c. */
#ifndef TM_KERNELS_CODES_H
#define TM_KERNELS_CODES_H

#include "kernels.h"

/* At most TM_QUANT_BLOCK values. */
typedef struct {
  /* Returns the scale. */
  float (*quantize)(const float *values, uint8_t *codes, size_t n, int is_signed);
  void (*dequantize)(const uint8_t *codes, float scale, float *values, size_t n, int is_signed);
} tm_codec;

tm_codec tm_codec_of(uint32_t isa);

#endif
