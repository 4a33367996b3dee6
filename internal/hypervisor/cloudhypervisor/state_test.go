package cloudhypervisor

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// The state of a guest with memory above 4 GiB, as version 53 writes it, as far as it says where the memory is.
const (
	stateText = `{"snapshots":{"cpu-manager":{"snapshots":{},"snapshot_data":{"state":"{\"big\":18446744073709551615}"}},` +
		`"memory-manager":{"snapshots":{},"snapshot_data":{"state":"` + stateMemory + `"}}},"snapshot_data":{"state":"{\"clock\":\"<&>\"}"}}`
	stateMemory = `{\"memory_ranges\":{\"data\":[{\"gpa\":0,\"length\":8192},{\"gpa\":4294967296,\"length\":4096}]},\"guest_ram_mappings\":[` +
		`{\"slot\":0,\"gpa\":0,\"size\":8192,\"zone_id\":\"mem0\",\"virtio_mem\":false,\"file_offset\":0},` +
		`{\"slot\":1,\"gpa\":4294967296,\"size\":4096,\"zone_id\":\"mem0\",\"virtio_mem\":false,\"file_offset\":0}],\"boot_ram\":12288}`
	stateBytes = 12288
)

// TestMapped: the program finds nothing to read, and where in the file each part of the memory is. Nothing else changes.
func TestMapped(t *testing.T) {
	got, err := mapped([]byte(stateText), stateBytes)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`\"memory_ranges\":{\"data\":[]}`, `\"gpa\":0,\"size\":8192,\"zone_id\":\"mem0\",\"virtio_mem\":false,\"file_offset\":0}`,
		`\"gpa\":4294967296,\"size\":4096,\"zone_id\":\"mem0\",\"virtio_mem\":false,\"file_offset\":8192}`, `{\"big\":18446744073709551615}`, `\"boot_ram\":12288`,
	} {
		if !strings.Contains(string(got), want) {
			t.Errorf("it has no %s:\n%s", want, got)
		}
	}
	if _, err := mapped(got, stateBytes); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("state that is mapped already: %v", err)
	}
	for name, change := range map[string][2]string{
		"no memory":      {memoryManager, "other"},
		"no state":       {`snapshot_data":{"state":"{\"mem`, `snapshot_data":{"other":"{\"mem`},
		"another zone":   {`zone_id\":\"mem0`, `zone_id\":\"mem1`},
		"virtio-mem":     {`mem\":false`, `mem\":true`},
		"another length": {`length\":4096`, `length\":8192`},
		"too long":       {`8192`, `18446744073709551615`},
		"twice":          {`gpa\":4294967296,\"length\":4096`, `gpa\":0,\"length\":8192`},
		"not JSON":       {`"snapshots":{"cpu`, `"snapshots":["cpu`},
	} {
		text := strings.ReplaceAll(stateText, change[0], change[1])
		if text == stateText {
			t.Fatalf("%s changes nothing", name)
		}
		if _, err := mapped([]byte(text), stateBytes); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := mapped([]byte(stateText), stateBytes+4096); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("a guest of another size: %v", err)
	}
}

// FuzzMapped: whatever the process has written as state, it is refused as damaged, or names no memory to read.
func FuzzMapped(f *testing.F) {
	f.Add([]byte(stateText))
	f.Add([]byte(`{"snapshots":{"memory-manager":{"snapshot_data":{"state":"{}"}}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := mapped(data, stateBytes)
		if err != nil {
			if !errdefs.Is(err, errdefs.DataLoss) {
				t.Fatalf("class of %v", err)
			}
			return
		}
		if !strings.Contains(string(got), `\"memory_ranges\":{\"data\":[]}`) {
			t.Fatalf("it has memory to read: %s", got)
		}
	})
}
