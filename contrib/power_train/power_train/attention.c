/*
 * Attention of one decode step over a batch of sequences of different lengths, for text generation.
 *
 * A library call per (sequence, head) costs more than its arithmetic where each query has one row;
 * this loop has no such overhead. Keys and values are bfloat16, the arithmetic is float32.
 *
 *   q, out   float [batch][kv_heads][group][DIM]
 *   k, v     bfloat16 [batch][kv_heads][capacity][DIM]
 *   lengths  rows of each sequence, at most capacity
 *   scratch  float [group][capacity]
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef DIM
#define DIM 64
#endif

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void decode_attention(const float *q, const uint16_t *k, const uint16_t *v, const int32_t *lengths, float *out,
                      float *scratch, int batch, int kv_heads, int group, int capacity, float scale) {
    for (int b = 0; b < batch; ++b) {
        const int rows = lengths[b];
        for (int h = 0; h < kv_heads; ++h) {
            const int64_t head = (int64_t)b * kv_heads + h;
            const float *queries = q + head * group * DIM;
            const uint16_t *keys = k + head * capacity * DIM;
            const uint16_t *values = v + head * capacity * DIM;
            float *results = out + head * group * DIM;

            for (int t = 0; t < rows; ++t) {
                float key[DIM];
                for (int d = 0; d < DIM; ++d) key[d] = widen(keys[(int64_t)t * DIM + d]);
                for (int g = 0; g < group; ++g) {
                    float sum = 0.0f;
                    for (int d = 0; d < DIM; ++d) sum += queries[g * DIM + d] * key[d];
                    scratch[g * capacity + t] = sum * scale;
                }
            }
            for (int g = 0; g < group; ++g) {
                float *row = scratch + g * capacity;
                float top = row[0], total = 0.0f;
                for (int t = 1; t < rows; ++t) top = row[t] > top ? row[t] : top;
                for (int t = 0; t < rows; ++t) total += row[t] = expf(row[t] - top);
                for (int t = 0; t < rows; ++t) row[t] /= total;
            }
            memset(results, 0, sizeof(float) * group * DIM);
            for (int t = 0; t < rows; ++t) {
                float value[DIM];
                for (int d = 0; d < DIM; ++d) value[d] = widen(values[(int64_t)t * DIM + d]);
                for (int g = 0; g < group; ++g) {
                    const float weight = scratch[g * capacity + t];
                    for (int d = 0; d < DIM; ++d) results[g * DIM + d] += weight * value[d];
                }
            }
        }
    }
}
