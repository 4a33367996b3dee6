package qemu

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestLimitDisks: each disk of the guest is limited, by the name that QEMU has for its device, and no drive for CD-ROMs.
func TestLimitDisks(t *testing.T) {
	ours, theirs := net.Pipe()
	var wg sync.WaitGroup
	var asked []string
	wg.Go(func() {
		defer theirs.Close()
		_, _ = io.WriteString(theirs, `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": []}}`+"\n")
		for sc := bufio.NewScanner(theirs); sc.Scan(); {
			var cmd struct {
				Execute   string          `json:"execute"`
				Arguments json.RawMessage `json:"arguments"`
				ID        uint64          `json:"id"`
			}
			if err := json.Unmarshal(sc.Bytes(), &cmd); err != nil {
				t.Errorf("%q: %v", sc.Text(), err)
			}
			result := "{}"
			switch cmd.Execute {
			case "query-block":
				result = `[{"qdev": "/machine/peripheral/virtio-disk0/virtio-backend", "inserted": {"node-name": "disk0"}}, {"qdev": "scsi-plug3", "inserted": {"node-name": "plug3"}},` +
					`{"qdev": "drive", "inserted": {"node-name": "drive"}}, {"qdev": "sata-disk1", "inserted": {"node-name": "disk1"}}, {"qdev": "usb-disk2"}, {"device": "pflash0"}]`
			case "block_set_io_throttle":
				asked = append(asked, string(cmd.Arguments))
			}
			if _, err := fmt.Fprintf(theirs, `{"return": %s, "id": %d}`+"\n", result, cmd.ID); err != nil {
				return
			}
		}
	})
	c, err := qmp.Open(t.Context(), ours, func(qmp.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []vm.DiskRate{{}, {Bytes: 1 << 20, Ops: 500}} {
		if err := limitDisks(t.Context(), c, r); err != nil {
			t.Error(err)
		}
	}
	_ = c.Close()
	wg.Wait()
	var want []string
	for _, id := range []string{"/machine/peripheral/virtio-disk0/virtio-backend", "scsi-plug3", "sata-disk1"} {
		want = append(want, `{"bps":1048576,"bps_rd":0,"bps_wr":0,"id":"`+id+`","iops":500,"iops_rd":0,"iops_wr":0}`)
	}
	if !slices.Equal(asked, want) {
		t.Errorf("QEMU was asked:\n%s\nwant:\n%s", strings.Join(asked, "\n"), strings.Join(want, "\n"))
	}
}

// A guest with limits waits for them: its CPUs do not run when QEMU begins. Nothing else of the command line changes, so limits can come and go.
func TestWaitsForLimits(t *testing.T) {
	plain, limited, diskless := ociPlan(), ociPlan(), ociPlan()
	limited.DiskRate.Ops, diskless.DiskRate.Ops, diskless.Disks = 500, 500, nil
	for want, plans := range map[bool][]hypervisor.Plan{false: {plain, diskless}, true: {limited}} {
		for _, p := range plans {
			c, err := build(p, testFacts(vm.AccelTCG))
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.Contains(c.args, "-S"); got != want {
				t.Errorf("%+v with %d disks: waits: %v", p.DiskRate, len(p.Disks), got)
			}
		}
	}
	a, _ := build(plain, testFacts(vm.AccelTCG))
	b, _ := build(limited, testFacts(vm.AccelTCG))
	if got := slices.DeleteFunc(b.args, func(s string) bool { return s == "-S" }); !slices.Equal(got, a.args) {
		t.Errorf("%q\nwant %q", got, a.args)
	}
}
