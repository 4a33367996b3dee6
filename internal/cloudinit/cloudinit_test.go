package cloudinit

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

const key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB0 me@host"

func guest() Guest {
	return Guest{ID: "abcdefghijklmnopqrstuvwxyz", Hostname: "web", NICs: []vm.NIC{
		{MAC: "52:54:00:AA:BB:01", IP: "10.1.2.3", Prefix: 24, Gateway: "10.1.2.1", DNS: []string{"10.1.2.1"}, MTU: 1400},
		{MAC: "52:54:00:aa:bb:02", IP: "10.9.0.3", Prefix: 24, DHCP: true},
	}}
}

func build(t *testing.T, g Guest, c vm.CloudInit) Seed {
	t.Helper()
	s, err := Build(g, c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// read returns a document as its reader understands it.
func read(t *testing.T, doc []byte) map[string]any {
	t.Helper()
	var m map[string]any
	if err := yaml.Unmarshal(doc, &m); err != nil {
		t.Fatalf("%v in %s", err, doc)
	}
	return m
}

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	if d := diff.Of(want, got); d != "" {
		t.Errorf("%s: %s", what, d)
	}
}

func TestNoCloudIsGenerated(t *testing.T) {
	s := build(t, guest(), vm.CloudInit{SSHKeys: []string{key + "\n\n# comment\n", key}})
	same(t, "label", s.Label, "cidata")
	same(t, "files", slices.Sorted(maps.Keys(s.Files)), []string{"meta-data", "network-config", "user-data"})
	same(t, "user-data", string(s.Files["user-data"]), "#cloud-config\n{}\n")
	same(t, "meta-data", read(t, s.Files["meta-data"]), map[string]any{
		"instance-id": "abcdefghijklmnopqrstuvwxyz", "local-hostname": "web", "public-keys": []any{key},
	})
	same(t, "network-config", read(t, s.Files["network-config"]), map[string]any{"version": 2, "ethernets": map[string]any{
		"eth0": map[string]any{
			"match": map[string]any{"macaddress": "52:54:00:aa:bb:01"}, "set-name": "eth0", "mtu": 1400, "addresses": []any{"10.1.2.3/24"},
			"routes": []any{map[string]any{"to": "0.0.0.0/0", "via": "10.1.2.1"}}, "nameservers": map[string]any{"addresses": []any{"10.1.2.1"}},
		},
		"eth1": map[string]any{"match": map[string]any{"macaddress": "52:54:00:aa:bb:02"}, "set-name": "eth1", "dhcp4": true, "dhcp4-overrides": map[string]any{"route-metric": 200}},
	}})
}

func TestConfigDriveIsGenerated(t *testing.T) {
	s := build(t, guest(), vm.CloudInit{Datasource: DatasourceConfigDrive, SSHKeys: []string{key}, VendorData: "#!/bin/sh\n"})
	const dir = "openstack/latest/"
	same(t, "label", s.Label, "config-2")
	same(t, "files", slices.Sorted(maps.Keys(s.Files)), []string{dir + "meta_data.json", dir + "network_data.json", dir + "user_data", dir + "vendor_data.json"})
	var meta, network map[string]any
	var vendor string
	for name, to := range map[string]any{"meta_data.json": &meta, "network_data.json": &network, "vendor_data.json": &vendor} {
		if err := json.Unmarshal(s.Files[dir+name], to); err != nil {
			t.Fatal(name, err)
		}
	}
	same(t, "meta_data", meta, map[string]any{
		"uuid": "abcdefghijklmnopqrstuvwxyz", "instance-id": "abcdefghijklmnopqrstuvwxyz", "hostname": "web", "local-hostname": "web",
		"public_keys": map[string]any{"key-0": key},
	})
	same(t, "vendor_data", vendor, "#!/bin/sh\n")
	same(t, "networks", network["networks"], []any{
		map[string]any{
			"id": "net-0", "network_id": "net-0", "link": "eth0", "type": "ipv4", "ip_address": "10.1.2.3", "netmask": "255.255.255.0",
			"routes": []any{map[string]any{"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.1.2.1"}},
		},
		map[string]any{"id": "net-1", "network_id": "net-1", "link": "eth1", "type": "ipv4_dhcp"},
	})
}

func TestIPv6AndGatewayOutsideThePrefix(t *testing.T) {
	n := networkV2([]vm.NIC{{MAC: "52:54:00:aa:bb:01", IP: "fd00::5", Prefix: 64, Gateway: "fe80::1"}})
	eth := n["ethernets"].(map[string]any)["eth0"].(map[string]any)
	same(t, "routes", eth["routes"], []any{map[string]any{"to": "::/0", "via": "fe80::1", "on-link": true}})
	w := networkData([]vm.NIC{{MAC: "52:54:00:aa:bb:01", IP: "fd00::5", Prefix: 64}})["networks"].([]any)[0].(map[string]any)
	same(t, "type", w["type"], "ipv6")
	same(t, "netmask", w["netmask"], "ffff:ffff:ffff:ffff::")
}

func TestDHCPv6(t *testing.T) {
	nics := []vm.NIC{{MAC: "52:54:00:aa:bb:01", IP: "10.1.2.3", Prefix: 24, DHCP: true, IPv6: "fd00::5", Addresses: []string{"fd00::5/128"}}}
	same(t, "network-config", networkV2(nics)["ethernets"], map[string]any{"eth0": map[string]any{
		"match": map[string]any{"macaddress": "52:54:00:aa:bb:01"}, "set-name": "eth0", "dhcp4": true, "dhcp6": true,
	}})
	same(t, "networks", networkData(nics)["networks"], []any{
		map[string]any{"id": "net-0", "network_id": "net-0", "link": "eth0", "type": "ipv4_dhcp"},
		map[string]any{"id": "net-0-1", "network_id": "net-0", "link": "eth0", "type": "ipv6_dhcpv6-stateful"},
	})
}

func TestFurtherAddresses(t *testing.T) {
	nics := []vm.NIC{{
		MAC: "52:54:00:aa:bb:01", IP: "10.1.2.3", Prefix: 24, Gateway: "10.1.2.1", Addresses: []string{"10.4.0.2/16", "fd00::5/64"},
		Routes: []vm.Route{{To: "10.9.0.0/16", Via: "10.4.0.1"}, {To: "::/0", Via: "fd00::1"}},
	}}
	eth := networkV2(nics)["ethernets"].(map[string]any)["eth0"].(map[string]any)
	same(t, "addresses", eth["addresses"], []string{"10.1.2.3/24", "10.4.0.2/16", "fd00::5/64"})
	same(t, "routes", eth["routes"], []any{
		map[string]any{"to": "0.0.0.0/0", "via": "10.1.2.1"},
		map[string]any{"to": "10.9.0.0/16", "via": "10.4.0.1"},
		map[string]any{"to": "::/0", "via": "fd00::1"},
	})
	same(t, "networks", networkData(nics)["networks"], []any{
		map[string]any{
			"id": "net-0", "network_id": "net-0", "link": "eth0", "type": "ipv4", "ip_address": "10.1.2.3", "netmask": "255.255.255.0",
			"routes": []any{
				map[string]any{"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.1.2.1"},
				map[string]any{"network": "10.9.0.0", "netmask": "255.255.0.0", "gateway": "10.4.0.1"},
			},
		},
		map[string]any{"id": "net-0-1", "network_id": "net-0", "link": "eth0", "type": "ipv4", "ip_address": "10.4.0.2", "netmask": "255.255.0.0"},
		map[string]any{
			"id": "net-0-2", "network_id": "net-0", "link": "eth0", "type": "ipv6", "ip_address": "fd00::5", "netmask": "ffff:ffff:ffff:ffff::",
			"routes": []any{map[string]any{"network": "::", "netmask": "::", "gateway": "fd00::1"}},
		},
	})
}

func TestMetaDataReplacesGeneratedKeys(t *testing.T) {
	s := build(t, guest(), vm.CloudInit{SSHKeys: []string{key}, MetaData: "instance-id: mine\nextra: {a: [1, 2.5, yes, ~, 2001-01-01]}\n"})
	same(t, "meta-data", read(t, s.Files["meta-data"]), map[string]any{
		"instance-id": "mine", "local-hostname": "web", "public-keys": []any{key},
		"extra": map[string]any{"a": []any{1, 2.5, "yes", nil, "2001-01-01"}},
	})
}

func TestNetworkConfigIsReplacedOrLeftOut(t *testing.T) {
	s := build(t, guest(), vm.CloudInit{NetworkConfig: "dhcp"})
	if _, ok := s.Files["network-config"]; ok {
		t.Error("dhcp leaves a network-config")
	}
	s = build(t, guest(), vm.CloudInit{NetworkConfig: "version: 1\n"})
	same(t, "network-config", string(s.Files["network-config"]), "version: 1\n")
	s = build(t, Guest{ID: "x", Hostname: "web"}, vm.CloudInit{})
	if _, ok := s.Files["network-config"]; ok {
		t.Error("a guest without interfaces gets a network-config")
	}
}

func TestGivenDocumentsAreNotTouched(t *testing.T) {
	const script = "#!/bin/sh\necho hi\n"
	const config = "#cloud-config\n# a comment\nruncmd:   [ls]\n"
	s := build(t, guest(), vm.CloudInit{UserData: script, VendorData: config})
	same(t, "user-data", string(s.Files["user-data"]), script)
	same(t, "vendor-data", string(s.Files["vendor-data"]), config)
}

func TestEnvironmentAndFiles(t *testing.T) {
	g := guest()
	g.Env = []vm.EnvVar{{Name: "A", Value: "1 2"}, {Name: "B", Value: "x\n$y"}}
	g.Files = []File{{Path: "/etc/secret", Data: []byte("hush"), Mode: 0o400}, {Path: "/etc/plain"}}
	files := func(doc []byte) []any { return read(t, doc)["write_files"].([]any) }
	want := []any{
		map[string]any{"path": "/etc/cloud/environment", "encoding": "b64", "permissions": "0644", "content": "QT0xIDIKQj0ieApcJHkiCg=="},
		map[string]any{"path": "/etc/secret", "encoding": "b64", "permissions": "0400", "content": "aHVzaA=="},
		map[string]any{"path": "/etc/plain", "encoding": "b64", "permissions": "0644", "content": ""},
	}

	s := build(t, g, vm.CloudInit{})
	same(t, "alone", files(s.Files["user-data"]), want)

	s = build(t, g, vm.CloudInit{UserData: "#cloud-config\nhostname: x\nwrite_files: [{path: /a}]\n"})
	same(t, "appended", files(s.Files["user-data"]), append([]any{map[string]any{"path": "/a"}}, want...))
	same(t, "kept", read(t, s.Files["user-data"])["hostname"], "x")

	s = build(t, g, vm.CloudInit{UserData: "#!/bin/sh\n"})
	same(t, "a script stays", string(s.Files["user-data"]), "#!/bin/sh\n")
	same(t, "beside a script", files(s.Files["vendor-data"]), want)

	_, err := Build(g, vm.CloudInit{UserData: "#!/bin/sh\n", VendorData: "#!/bin/sh\n"})
	if !errdefs.IsInvalid(err) {
		t.Errorf("no room for files: %v", err)
	}
	for _, p := range []string{"relative", "/a/../b", "/", "", "/a\x00"} {
		if _, err := AddFiles("", []File{{Path: p}}); !errdefs.IsInvalid(err) {
			t.Errorf("path %q: %v", p, err)
		}
	}
}

func TestMerge(t *testing.T) {
	for name, tc := range map[string]struct{ base, over, want string }{
		"lists are appended":        {"a: [1]", "a: [2, 1]", "a: [1, 2, 1]"},
		"maps are merged":           {"a: {b: 1, c: {d: 2}}", "a: {c: {e: 3}, f: 4}", "a: {b: 1, c: {d: 2, e: 3}, f: 4}"},
		"scalars are replaced":      {"a: 1\nb: 2", "a: x", "a: x\nb: 2"},
		"another kind replaces":     {"a: [1]", "a: {b: 1}", "a: {b: 1}"},
		"null replaces nothing":     {"a: [1]", "a:", "a: [1]"},
		"null is replaced":          {"a:", "a: [1]", "a: [1]"},
		"nothing over something":    {"a: 1", "", "a: 1"},
		"something over nothing":    {"", "#cloud-config\na: 1", "a: 1"},
		"comments alone":            {"#cloud-config\n# x\n", "a: 1", "a: 1"},
		"aliases are written out":   {"x: &x {a: 1}\ny: *x", "y: {b: 2}", "x: {a: 1}\ny: {a: 1, b: 2}"},
		"merge keys, too":           {"x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}", "", "x: {a: 1, b: 2}\ny: {b: 3, a: 1}"},
		"YAML 1.1 words stay bare":  {"a: yes\nb: 0644\nc: 22:22\nd: 'no'", "", "a: yes\nb: 0644\nc: 22:22\nd: 'no'"},
		"JSON":                      {`{"a": {"b": "c"}}`, "", "a: {b: c}"},
		"long and multi-line texts": {"a: |\n  x: y\n   z\nb: \"\\0\\u2028\"", "", "a: \"x: y\\n z\\n\"\nb: \"\\0\\u2028\""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Merge(tc.base, tc.over)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(got, "#cloud-config\n") {
				t.Errorf("no header: %s", got)
			}
			same(t, "merged", read(t, []byte(got)), read(t, []byte(tc.want)))
		})
	}
	got, err := Merge("a: yes\nb: 0644\nc: 22:22\nd: 'no'\ne: \"yes\"\n", "")
	if want := "#cloud-config\na: yes\nb: 0644\nc: 22:22\nd: \"no\"\ne: \"yes\"\n"; err != nil || got != want {
		t.Errorf("%v\n%s\nwant\n%s", err, got, want)
	}
}

func bomb() string {
	var b strings.Builder
	b.WriteString("a0: &a0 [x, x]\n")
	for i := range 60 {
		fmt.Fprintf(&b, "a%d: &a%d [*a%d, *a%d]\n", i+1, i+1, i, i)
	}
	return b.String()
}

func TestBadDocumentsAreRefusedWithoutQuotingThem(t *testing.T) {
	const hush = "hunter2"
	for name, c := range map[string]vm.CloudInit{
		"user-data is not YAML":             {UserData: "#cloud-config\na: [" + hush},
		"user-data is not YAML, alias":      {UserData: "#cloud-config\na: *" + hush},
		"user-data is a list":               {UserData: "#cloud-config\n- " + hush},
		"user-data is nothing known":        {UserData: "password: " + hush},
		"user-data has two documents":       {UserData: "#cloud-config\na: 1\n---\nb: " + hush},
		"user-data has a key twice":         {UserData: "#cloud-config\n" + hush + ": 1\n" + hush + ": 2\n"},
		"user-data has a tag":               {UserData: "#cloud-config\na: !!python/object/apply:os.system [" + hush + "]\n"},
		"user-data has a tag on a scalar":   {UserData: "#cloud-config\na: !x " + hush},
		"user-data has a key that is a map": {UserData: "#cloud-config\n? {a: " + hush + "}\n: 1\n"},
		"user-data is binary":               {UserData: "#!" + hush + "\x00"},
		"user-data is not UTF-8":            {UserData: "#!" + hush + "\xff"},
		"user-data is too large":            {UserData: "#!" + strings.Repeat(hush, MaxDocument/len(hush)+1)},
		"user-data grows":                   {UserData: "#cloud-config\n" + bomb()},
		"user-data contains itself":         {UserData: "#cloud-config\na: &a [*a]\n"},
		"user-data is deep":                 {UserData: "#cloud-config\na: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000)},
		"vendor-data is not YAML":           {VendorData: "#cloud-config\na: [" + hush},
		"meta-data is not YAML":             {MetaData: "a: [" + hush},
		"meta-data is a list":               {MetaData: "[" + hush + "]"},
		"network-config is a word":          {NetworkConfig: hush},
		"network-config is not JSON":        {NetworkConfig: "version: 2", Datasource: "configdrive"},
		"data source":                       {Datasource: "ec2"},
		"key is private":                    {SSHKeys: []string{"-----BEGIN OPENSSH PRIVATE KEY-----\n" + hush}},
		"key is a word":                     {SSHKeys: []string{hush}},
		"key with a control character":      {SSHKeys: []string{key + "\x07"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := Validate(c)
			if !errdefs.IsInvalid(err) {
				t.Fatalf("%v", err)
			}
			if strings.Contains(err.Error(), hush) {
				t.Errorf("the error quotes the document: %v", err)
			}
		})
	}
}

func TestKindsOfUserData(t *testing.T) {
	for _, doc := range []string{
		"", "#cloud-config\n", " \n#Cloud-Config\na: 1\n", "#!/bin/sh\n", "#include\nhttp://x\n", "#cloud-boothook\n", "#cloud-config-archive\n- a\n",
		"## template: jinja\n#cloud-config\na: {{ v1.x }}\n", "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=x\n",
	} {
		if err := Validate(vm.CloudInit{UserData: doc}); err != nil {
			t.Errorf("%q: %v", doc, err)
		}
	}
}

func TestKeysWithOptions(t *testing.T) {
	for _, k := range []string{
		`command="ls -l",no-pty ssh-rsa AAAAB3 x`, "ecdsa-sha2-nistp256 AAAAE2", "sk-ssh-ed25519@openssh.com AAAAGn",
	} {
		if err := Validate(vm.CloudInit{SSHKeys: []string{k}}); err != nil {
			t.Errorf("%s: %v", k, err)
		}
	}
}

// FuzzMerge checks any merge: it ends, the result is valid, merging nothing more changes nothing, and keys only in base stay.
func FuzzMerge(f *testing.F) {
	for _, s := range [][2]string{
		{"a: [1]\nb: {c: d}", "a: [2]\nb: {e: f}"},
		{"#cloud-config\nusers:\n  - name: x\n    ssh_authorized_keys: [k]\n", "#cloud-config\nwrite_files:\n- path: /a\n  content: |\n    x\n     y\n"},
		{"x: &x {a: 1}\ny: {<<: *x}\nz: *x", "y: ~\nz: [1]"},
		{"a: yes\nb: 0644\nc: 22:22\nd: 1e3\ne: .nan\nf: 2001-01-01 10:00:00", "a: !!str yes\nb: !!binary aGk=\n"},
		{"a: &a [*a]", bomb()},
		{"? a\n: - b\n  - - c\n", "{a: [], b: {}}"},
		{"a: \"\\u0085\\0\\x7f\\ufeff\"\n", "a: >-\n  x\n\n  y\n"},
		{"~: 1\n", "1: x\n'': y\n"},
		{"- a: :\n", "a: b: c"},
		{"<<: 1", "<<: {a: 1}"},
	} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, base, over string) {
		got, err := Merge(base, over)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Fatalf("%v", err)
			}
			return
		}
		again, err := Merge(got, "")
		if err != nil {
			t.Fatalf("%v in what was written:\n%s", err, got)
		}
		if again != got {
			t.Fatalf("not stable:\n%s\nbecame\n%s", got, again)
		}
		if _, err := Merge("", got); err != nil {
			t.Fatal(err)
		}
		b, _ := parse("base", base)
		o, _ := parse("over", over)
		m, _ := parse("merged", got)
		mm := plainValue(m).(map[string]any)
		om := plainValue(o).(map[string]any)
		for k, v := range plainValue(b).(map[string]any) {
			if _, ok := om[k]; !ok && !reflect.DeepEqual(mm[k], v) {
				t.Fatalf("%q was %#v and is %#v", k, v, mm[k])
			}
		}
		added, err := AddFiles(got, []File{{Path: "/x", Data: []byte(base)}})
		if err != nil {
			t.Fatal(err)
		}
		if err := Validate(vm.CloudInit{UserData: added}); err != nil && len(added) <= MaxDocument {
			t.Fatal(err)
		}
	})
}

// FuzzBuild checks meta-data and keys of any form: no panic, and a YAML parser can read the result.
func FuzzBuild(f *testing.F) {
	f.Add("a: 1", key, "web", "10.0.0.1", true)
	f.Add("{\"instance-id\": \"\\u007f\"}", "command=\"x\" ssh-rsa AAAA", "on", "fd00::1", false)
	f.Add("a: .inf\nb: [!!binary aGk=]", "", "", "x", false)
	f.Fuzz(func(t *testing.T, meta, keys, host, ip string, drive bool) {
		c := vm.CloudInit{MetaData: meta, SSHKeys: []string{keys}}
		if drive {
			c.Datasource = DatasourceConfigDrive
		}
		s, err := Build(Guest{ID: "x", Hostname: host, NICs: []vm.NIC{{MAC: "52:54:00:00:00:01", IP: ip, Prefix: 24, Gateway: ip}}}, c)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Fatal(err)
			}
			return
		}
		for name, doc := range s.Files {
			var v any
			if err := yaml.Unmarshal(doc, &v); err != nil {
				t.Fatalf("%s: %v\n%s", name, err, doc)
			}
		}
	})
}
