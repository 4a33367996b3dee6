package cloudhypervisor

import (
	"encoding/json"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxState limits the state of devices and CPUs, in bytes: the process may be in the hands of its guest.
const maxState = 64 << 20

// The parts of saved state that say where the memory is. All else stays as it is.

const memoryManager = "memory-manager"

type memoryRange struct {
	GPA    uint64 `json:"gpa"`
	Length uint64 `json:"length"`
}

type memoryRanges struct {
	Data []memoryRange `json:"data"`
}

type memoryMapping struct {
	Slot      uint32 `json:"slot"`
	GPA       uint64 `json:"gpa"`
	Size      uint64 `json:"size"`
	Zone      string `json:"zone_id"`
	VirtioMem bool   `json:"virtio_mem"`
	Offset    uint64 `json:"file_offset"`
}

type fields map[string]json.RawMessage

// mapped makes saved state that of a guest whose memory of size bytes is a file, which the program maps and does not read. The file is what it has saved as
// memory-ranges.
// Errors: DataLoss.
func mapped(state []byte, size int64) ([]byte, error) {
	state, err := within(state, []string{"snapshots", memoryManager, "snapshot_data", "state"}, func(text json.RawMessage) (any, error) {
		var inner string
		if err := json.Unmarshal(text, &inner); err != nil {
			return nil, err
		}
		b, err := mapMemory([]byte(inner), size)
		return string(b), err
	})
	if err != nil {
		return nil, errdefs.DataLossf("the state that Cloud Hypervisor has saved is not as the driver knows it: %w", err)
	}
	return state, nil
}

// within changes the field of a JSON text to which path leads.
func within(text []byte, path []string, change func(json.RawMessage) (any, error)) ([]byte, error) {
	var f fields
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, err
	}
	inner, ok := f[path[0]]
	if !ok {
		return nil, errdefs.NotFoundf("it has no %s", path[0])
	}
	var b []byte
	var err error
	if len(path) > 1 {
		b, err = within(inner, path[1:], change)
	} else {
		var to any
		if to, err = change(inner); err == nil {
			b, err = json.Marshal(to)
		}
	}
	if err != nil {
		return nil, err
	}
	f[path[0]] = b
	return json.Marshal(f)
}

// mapMemory takes the list of what is to be read out of the state of the memory, and says of each part of the memory where in the file it is.
func mapMemory(text []byte, size int64) ([]byte, error) {
	var s struct {
		Ranges   *memoryRanges   `json:"memory_ranges"`
		Mappings []memoryMapping `json:"guest_ram_mappings"`
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, err
	}
	if s.Ranges == nil || len(s.Ranges.Data) == 0 || len(s.Ranges.Data) != len(s.Mappings) {
		return nil, errdefs.Invalidf("%d parts of the memory are mapped, and others are saved", len(s.Mappings))
	}
	byAddress := map[uint64]*memoryMapping{}
	for n := range s.Mappings {
		byAddress[s.Mappings[n].GPA] = &s.Mappings[n]
	}
	var at uint64
	for _, r := range s.Ranges.Data {
		m := byAddress[r.GPA]
		if m == nil || m.Size != r.Length || m.Zone != memoryZone || m.VirtioMem || r.Length > uint64(size)-at {
			return nil, errdefs.Invalidf("the part of the memory at %#x is not mapped as it is saved", r.GPA)
		}
		delete(byAddress, r.GPA) // each part is there once
		m.Offset = at
		at += r.Length
	}
	if at != uint64(size) {
		return nil, errdefs.Invalidf("%d bytes of memory are saved, and the guest has %d", at, size)
	}
	text, err := within(text, []string{"memory_ranges"}, func(json.RawMessage) (any, error) { return memoryRanges{Data: []memoryRange{}}, nil })
	if err != nil {
		return nil, err
	}
	return within(text, []string{"guest_ram_mappings"}, func(json.RawMessage) (any, error) { return s.Mappings, nil })
}
