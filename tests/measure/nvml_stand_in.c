/* A stand-in for libnvidia-ml.so.1, for hosts without a driver.
 *
 * It answers the calls of nvidia-ml-py that tuner makes, with NVML's own signatures (nvml.h, API 12).
 * What it answers is read from the environment; codes are NVML's (4 no permission, 13 no such function):
 *   NVML_STAND_IN_INIT       return code of nvmlInitWithFlags: 0, 9 (driver not loaded), 18 (mismatch) ...
 *   NVML_STAND_IN_MEMORY     return code of nvmlDeviceGetMemoryInfo for a GPU: 0, 4, 15 (lost) ...
 *   NVML_STAND_IN_SLICE_MEMORY  the same for a MIG slice
 *   NVML_STAND_IN_ERRORS     "nvmlFUNCTION=CODE ...": return codes of other functions
 *   NVML_STAND_IN_AFTER      "N CODE": from the Nth call after nvmlInit on, everything returns CODE
 *   NVML_STAND_IN_NAME       name of the GPUs; none: there is no GPU
 *   NVML_STAND_IN_COUNT      how many there are, at most 4; one by default
 *   NVML_STAND_IN_CAPABILITY 86 for 8.6
 *   NVML_STAND_IN_TOTAL, NVML_STAND_IN_USED    bytes; used includes the driver's reserve:
 *   NVML_STAND_IN_RESERVED   bytes that nobody uses but the driver
 *   NVML_STAND_IN_SLICES     "UUID:TOTAL:USED ...": the first GPU is in MIG mode and has these slices
 *   NVML_STAND_IN_PROCESSES  "PID:BYTES PID:? ...", where ? is "not available"
 *   NVML_STAND_IN_GRAPHICS   the same for processes that draw
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPUS = 4, SLICES = 7 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { char uuid[96]; memory_t memory; int is_slice; } device_t;

static device_t gpus[GPUS], slices[SLICES];
static int calls; /* since nvmlInit */

static long long number(const char *name) {
    const char *text = getenv(name);
    return text ? atoll(text) : 0;
}

/* The code that a call of `function` returns. */
static int answer(const char *function) {
    int from, code;
    char named[64];
    const char *text = getenv("NVML_STAND_IN_AFTER");
    if (text && sscanf(text, "%d %d", &from, &code) == 2 && ++calls >= from) return code;
    if (!(text = getenv("NVML_STAND_IN_ERRORS"))) return SUCCESS;
    for (int used; sscanf(text, " %63[A-Za-z0-9_]=%d%n", named, &code, &used) == 2; text += used)
        if (strcmp(named, function) == 0) return code;
    return SUCCESS;
}

#define ANSWER                                \
    do {                                      \
        int code = answer(__func__);          \
        if (code != SUCCESS) return code;     \
    } while (0)

static int text(const char *from, char *to, unsigned length) {
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

static unsigned gpu_count(void) {
    if (!getenv("NVML_STAND_IN_NAME")) return 0;
    return getenv("NVML_STAND_IN_COUNT") ? (unsigned)number("NVML_STAND_IN_COUNT") : 1;
}

static device_t *gpu(unsigned index) {
    device_t *found = &gpus[index];
    snprintf(found->uuid, sizeof found->uuid, "GPU-5741d1c0-0000-0000-0000-%012u", index + 1);
    found->memory.total = number("NVML_STAND_IN_TOTAL");
    found->memory.used = number("NVML_STAND_IN_USED");
    return found;
}

static unsigned slice_count(void) {
    const char *from = getenv("NVML_STAND_IN_SLICES");
    unsigned found = 0;
    int used;
    for (; from && found < SLICES; from += used, found++) {
        device_t *slice = &slices[found];
        slice->is_slice = 1;
        if (sscanf(from, " %95[^: ]:%llu:%llu%n", slice->uuid, &slice->memory.total, &slice->memory.used,
                   &used) != 3)
            break;
    }
    return found;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    calls = 0;
    return (int)number("NVML_STAND_IN_INIT");
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return answer(__func__); }
const char *nvmlErrorString(int code) { (void)code; return "stand-in"; }
int nvmlSystemGetDriverVersion(char *to, unsigned length) { ANSWER; return text("570.195.03", to, length); }
int nvmlDeviceGetCount_v2(unsigned *count) { ANSWER; *count = gpu_count(); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    ANSWER;
    if (index >= gpu_count()) return NOT_FOUND;
    *device = gpu(index);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    ANSWER;
    for (unsigned index = 0; index < gpu_count(); index++)
        if (strcmp(uuid, gpu(index)->uuid) == 0) return *device = &gpus[index], SUCCESS;
    for (unsigned index = 0; index < slice_count(); index++)
        if (strcmp(uuid, slices[index].uuid) == 0) return *device = &slices[index], SUCCESS;
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(device_t *device, char *to, unsigned length) {
    ANSWER;
    return text(device->uuid, to, length);
}

int nvmlDeviceGetName(device_t *device, char *to, unsigned length) {
    ANSWER;
    char name[96];
    snprintf(name, sizeof name, "%s%s", getenv("NVML_STAND_IN_NAME"), device->is_slice ? " MIG 1g.5gb" : "");
    return text(name, to, length);
}

int nvmlDeviceGetCudaComputeCapability(device_t *device, int *major, int *minor) {
    ANSWER;
    if (device->is_slice) return NOT_SUPPORTED;
    *major = (int)number("NVML_STAND_IN_CAPABILITY") / 10;
    *minor = (int)number("NVML_STAND_IN_CAPABILITY") % 10;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory) {
    ANSWER;
    *memory = device->memory;
    memory->free = memory->total - memory->used;
    return (int)number(device->is_slice ? "NVML_STAND_IN_SLICE_MEMORY" : "NVML_STAND_IN_MEMORY");
}

int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *memory) {
    ANSWER;
    memory->total = device->memory.total;
    memory->reserved = device->is_slice ? 0 : number("NVML_STAND_IN_RESERVED");
    memory->used = device->memory.used - memory->reserved;
    memory->free = device->memory.total - device->memory.used;
    return (int)number(device->is_slice ? "NVML_STAND_IN_SLICE_MEMORY" : "NVML_STAND_IN_MEMORY");
}

int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending) {
    ANSWER;
    if (!getenv("NVML_STAND_IN_SLICES") || device->is_slice) return NOT_SUPPORTED;
    *current = *pending = device == &gpus[0];
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count) {
    ANSWER;
    *count = device == &gpus[0] ? SLICES : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned index, void **slice) {
    ANSWER;
    if (device != &gpus[0] || index >= slice_count()) return NOT_FOUND;
    *slice = &slices[index];
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t *slice, void **device) {
    ANSWER;
    *device = gpu(0);
    return slice->is_slice ? SUCCESS : NOT_FOUND;
}

static int listed(const char *from, unsigned *count, process_t *processes) {
    unsigned found = 0, room = *count;
    int used;
    char pid[32], bytes[32];
    for (; from && sscanf(from, " %31[0-9]:%31[0-9?]%n", pid, bytes, &used) == 2; from += used, found++)
        if (processes && found < room) {
            processes[found].pid = (unsigned)atoll(pid);
            processes[found].used = *bytes == '?' ? ~0ULL : strtoull(bytes, NULL, 10);
            processes[found].gpu_instance = processes[found].compute_instance = ~0U;
        }
    *count = found;
    return found > room || (found && !processes) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *processes) {
    ANSWER;
    (void)device;
    return listed(getenv("NVML_STAND_IN_PROCESSES"), count, processes);
}

int nvmlDeviceGetComputeRunningProcesses_v2(device_t *device, unsigned *count, process_t *processes) {
    ANSWER;
    (void)device;
    return listed(getenv("NVML_STAND_IN_PROCESSES"), count, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *device, unsigned *count, process_t *processes) {
    ANSWER;
    (void)device;
    return listed(getenv("NVML_STAND_IN_GRAPHICS"), count, processes);
}
