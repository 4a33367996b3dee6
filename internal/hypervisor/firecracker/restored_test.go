package firecracker

import (
	"encoding/json"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestOtherMachine: only the machine of the plan runs, whatever the state of a snapshot from elsewhere has in it.
func TestOtherMachine(t *testing.T) {
	const sound = `{"balloon":{"amount_mib":0,"deflate_on_oom":true,"stats_polling_interval_s":0,"free_page_hinting":false,"free_page_reporting":true},` +
		`"drives":[{"drive_id":"disk1","path_on_host":"/disks/1","is_read_only":false,"socket":null},{"drive_id":"disk0","path_on_host":"/disks/0","is_read_only":true,"rate_limiter":null}],` +
		`"boot-source":{"kernel_image_path":"/boot/kernel","initrd_path":null,"boot_args":null},"cpu-config":null,"logger":null,` +
		`"machine-config":{"vcpu_count":2,"mem_size_mib":512,"smt":false,"track_dirty_pages":false,"huge_pages":"None"},"metrics":null,"mmds-config":null,` +
		`"network-interfaces":[{"iface_id":"net1","host_dev_name":"tap"}],"vsock":{"guest_cid":3,"uds_path":"/run/agent.sock"},"entropy":{"rate_limiter":null},"pmem":[],"memory-hotplug":null}`
	p := hypervisor.Plan{CPUs: 2, Memory: 512 << 20, Disks: []vm.Disk{{ReadOnly: true}, {}}, NICs: []vm.NIC{{Place: 1}}, Agent: "agent"}
	for what, c := range map[string]struct{ from, to, want string }{
		"sound":            {"", "", ""},
		"more CPUs":        {`"vcpu_count":2`, `"vcpu_count":32`, "32 CPUs, not 2"},
		"other memory":     {`:512`, `:4096`, "4096 MiB"},
		"another disk":     {`"drives":[`, `"drives":[{"drive_id":"free","path_on_host":"/disks/1"},`, "3 disks, not 2"},
		"a disk elsewhere": {`/disks/0`, `/run/kernel`, `disk "disk0" at "/run/kernel"`},
		"a disk twice":     {`disk0","path_on_host":"/disks/0`, `disk1","path_on_host":"/disks/1`, `disk "disk1"`},
		"no interface":     {`{"iface_id":"net1","host_dev_name":"tap"}`, "", "0 network interfaces"},
		"other interface":  {`net1`, `net0`, `interface "net0"`},
		"nothing":          {sound, "{}", "0 CPUs"},

		"writable":          {`"is_read_only":true`, `"is_read_only":false`, `disk "disk0", which the guest can write to`},
		"a vhost-user disk": {`"path_on_host":"/disks/1","is_read_only":false,"socket":null`, `"path_on_host":null,"is_read_only":null,"socket":"/run/disk.sock"`, `disk "disk1" at ""`},
		"io_uring":          {`"is_read_only":false,"socket":null`, `"is_read_only":false,"io_engine":"Async","socket":null`, `disk "disk1" with the engine "Async"`},
		"ordinary calls":    {`"is_read_only":false,"socket":null`, `"is_read_only":false,"io_engine":"Sync","socket":null`, ""},
		"threads":           {`"smt":false`, `"smt":true`, "threads"},
		"huge pages":        {`"huge_pages":"None"`, `"huge_pages":"2M"`, "huge pages"},
		"inflated":          {`"amount_mib":0`, `"amount_mib":100`, "balloon of 100 MiB"},
		"persistent memory": {`"pmem":[]`, `"pmem":[{"id":"pmem0","path_on_host":"/disks/1","root_device":false,"read_only":false,"rate_limiter":null}]`, "1 devices of persistent memory"},
		"more memory later": {`"memory-hotplug":null`, `"memory-hotplug":{"total_size_mib":1048576,"block_size_mib":2,"slot_size_mib":128}`, "memory that can be plugged"},
		"metadata":          {`"mmds-config":null`, `"mmds-config":{"version":"V1","network_interfaces":["net1"],"ipv4_address":"169.254.169.254","imds_compat":false}`, "metadata service"},
		"other socket":      {`/run/agent.sock`, `/run/api.sock`, `virtio socket at "/run/api.sock"`},
		"other address":     {`"guest_cid":3`, `"guest_cid":4`, "virtio socket"},
		"no socket":         {`{"guest_cid":3,"uds_path":"/run/agent.sock"}`, "null", "no virtio socket"},

		"as an earlier version says it": {`,"entropy":{"rate_limiter":null},"pmem":[],"memory-hotplug":null`, "", ""},
	} {
		var r restored
		if err := json.Unmarshal([]byte(strings.Replace(sound, c.from, c.to, 1)), &r); err != nil {
			t.Fatal(err)
		}
		if got := r.differs(p); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
	}
	p.Agent = ""
	var r restored
	if err := json.Unmarshal([]byte(sound), &r); err != nil {
		t.Fatal(err)
	}
	if got := r.differs(p); !strings.Contains(got, "virtio socket") {
		t.Errorf("a socket that the plan does not have: %q", got)
	}
}
