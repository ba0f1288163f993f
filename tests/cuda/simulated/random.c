// cuRAND: the functions that candle calls when it creates a device.
#include <stdlib.h>

int curandCreateGenerator(void **generator, int type) {
    (void)type;
    *generator = malloc(1);
    return *generator ? 0 : 102; // CURAND_STATUS_ALLOCATION_FAILED
}
int curandDestroyGenerator(void *generator) {
    free(generator);
    return 0;
}
int curandSetPseudoRandomGeneratorSeed(void *generator, unsigned long long seed) {
    (void)generator, (void)seed;
    return 0;
}
int curandSetStream(void *generator, void *stream) {
    (void)generator, (void)stream;
    return 0;
}
