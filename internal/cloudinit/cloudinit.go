// Package cloudinit makes the documents that configure a disk guest through cloud-init: meta-data, user-data, vendor-data
// and network configuration, in the layouts of the NoCloud and ConfigDrive data sources.
//
// It is pure: documents in, documents out. It reads no file, writes no disk (internal/image/seed does) and knows nothing
// of pods. Documents may be secret, so no error of this package quotes one.
package cloudinit

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// The data sources, for vm.CloudInit.Datasource. Empty is DatasourceNoCloud.
const (
	DatasourceNoCloud     = "nocloud"
	DatasourceConfigDrive = "configdrive"
)

// NetworkDHCP as vm.CloudInit.NetworkConfig omits the network configuration. The image then uses its own default, which is
// DHCP.
const NetworkDHCP = "dhcp"

// Limits in bytes.
const (
	MaxDocument = 1 << 20 // of each given document
	maxSeed     = 8 << 20 // of all that a guest gets
	maxKeys     = 1000    // number of SSH keys
)

// environmentFile is where the environment is written, the same place as in Virtlet: lines of NAME=VALUE. A value with
// line breaks is quoted so that a shell and systemd read it; any other value is written as it is.
const environmentFile = "/etc/cloud/environment"

// Guest is the input for the generated documents: the guest's identity and what it gets besides the given documents.
type Guest struct {
	ID       vm.ID // becomes the instance id: when it changes, cloud-init sets up the guest again
	Hostname string
	NICs     []vm.NIC
	Env      []vm.EnvVar // written to /etc/cloud/environment
	Files    []File      // written when the guest boots for the first time
	Mounts   []Mount
}

// Seed is the content of a seed disk.
type Seed struct {
	Label string            // of the volume; cloud-init finds the volume by it
	Files map[string][]byte // by path, without a leading slash
}

// Validate returns an InvalidArgument error if c cannot be used, or not with these mounts.
func Validate(c vm.CloudInit, mounts ...Mount) error {
	_, err := Build(Guest{ID: "check", Hostname: "check", Mounts: mounts}, c)
	return err
}

// Build returns the seed of g. The documents of c override the generated ones.
func Build(g Guest, c vm.CloudInit) (Seed, error) {
	if err := checkDatasource(c.Datasource); err != nil {
		return Seed{}, err
	}
	for name, doc := range map[string]string{"user-data": c.UserData, "vendor-data": c.VendorData, "meta-data": c.MetaData, "network-config": c.NetworkConfig} {
		if len(doc) > MaxDocument {
			return Seed{}, errdefs.Invalidf("cloud-init: %s has %d bytes; at most %d are possible", name, len(doc), MaxDocument)
		}
	}
	c, err := WithFiles(c, append(environment(g.Env), g.Files...))
	if err != nil {
		return Seed{}, err
	}
	if c, err = withMounts(c, g.Mounts); err != nil {
		return Seed{}, err
	}
	keys, err := sshKeys(c.SSHKeys)
	if err != nil {
		return Seed{}, err
	}
	if c, err = withLogin(c, keys); err != nil {
		return Seed{}, err
	}
	if err := checkData("user-data", c.UserData); err != nil {
		return Seed{}, err
	}
	if err := checkData("vendor-data", c.VendorData); err != nil {
		return Seed{}, err
	}
	given, err := metaData(c.MetaData)
	if err != nil {
		return Seed{}, err
	}
	var s Seed
	if c.Datasource == DatasourceConfigDrive {
		s, err = configDrive(g, c, keys, given)
	} else {
		s, err = noCloud(g, c, keys, given)
	}
	if err != nil {
		return Seed{}, err
	}
	total := 0
	for _, data := range s.Files {
		total += len(data)
	}
	if total > maxSeed {
		return Seed{}, errdefs.Invalidf("cloud-init: documents and files are %d bytes together; at most %d are possible", total, maxSeed)
	}
	return s, nil
}

func noCloud(g Guest, c vm.CloudInit, keys []string, given map[string]any) (Seed, error) {
	meta := map[string]any{"instance-id": string(g.ID), "local-hostname": g.Hostname}
	if len(keys) > 0 {
		meta["public-keys"] = keys
	}
	maps.Copy(meta, given)
	doc, err := encodeJSON("meta-data", meta) // JSON is YAML, and has no surprises
	if err != nil {
		return Seed{}, err
	}
	s := Seed{Label: "cidata", Files: map[string][]byte{"meta-data": doc, "user-data": orEmpty(c.UserData)}}
	if c.VendorData != "" {
		s.Files["vendor-data"] = []byte(c.VendorData)
	}
	switch c.NetworkConfig {
	case NetworkDHCP:
	case "":
		if len(g.NICs) > 0 {
			s.Files["network-config"], err = encodeJSON("network-config", networkV2(g.NICs))
		}
	default:
		if _, err = parse("network-config", c.NetworkConfig); err == nil {
			s.Files["network-config"] = []byte(c.NetworkConfig)
		}
	}
	return s, err
}

func configDrive(g Guest, c vm.CloudInit, keys []string, given map[string]any) (Seed, error) {
	meta := map[string]any{
		"uuid": string(g.ID), "instance-id": string(g.ID), "hostname": g.Hostname, "local-hostname": g.Hostname,
	}
	if len(keys) > 0 {
		byName := map[string]string{}
		for i, k := range keys {
			byName["key-"+strconv.Itoa(i)] = k
		}
		meta["public_keys"] = byName
	}
	maps.Copy(meta, given)
	doc, err := encodeJSON("meta-data", meta)
	if err != nil {
		return Seed{}, err
	}
	const dir = "openstack/latest/"
	s := Seed{Label: "config-2", Files: map[string][]byte{dir + "meta_data.json": doc, dir + "user_data": orEmpty(c.UserData)}}
	if c.VendorData != "" { // any document fits into a JSON string
		if s.Files[dir+"vendor_data.json"], err = encodeJSON("vendor-data", c.VendorData); err != nil {
			return Seed{}, err
		}
	}
	switch c.NetworkConfig {
	case NetworkDHCP:
	case "":
		if len(g.NICs) > 0 {
			s.Files[dir+"network_data.json"], err = encodeJSON("network-config", networkData(g.NICs))
		}
	default:
		if err = checkText("network-config", c.NetworkConfig); err == nil && !isJSONMap(c.NetworkConfig) {
			err = errdefs.Invalidf("cloud-init: network-config must be an OpenStack network_data.json with data source configdrive")
		}
		s.Files[dir+"network_data.json"] = []byte(c.NetworkConfig)
	}
	return s, err
}

func isJSONMap(doc string) bool {
	var m map[string]any
	return json.Unmarshal([]byte(doc), &m) == nil && m != nil
}

// orEmpty returns doc, or the empty configuration if doc is empty: both data sources require the file.
func orEmpty(doc string) []byte {
	if doc == "" {
		return []byte(header + "{}\n") // cloud-init warns about a cloud-config without content
	}
	return []byte(doc)
}

func checkDatasource(d string) error {
	switch d {
	case "", DatasourceNoCloud, DatasourceConfigDrive:
		return nil
	}
	return errdefs.Invalidf("cloud-init: invalid data source %q; use nocloud or configdrive", d)
}

// metaData reads the map whose keys replace generated ones.
func metaData(doc string) (map[string]any, error) {
	if doc == "" {
		return nil, nil
	}
	n, err := parse("meta-data", doc)
	if err != nil {
		return nil, err
	}
	m, ok := plainValue(n).(map[string]any)
	if !ok {
		return nil, errdefs.Invalidf("cloud-init: meta-data is not a map")
	}
	return m, nil
}

// sshKeys collects the lines of authorized_keys in list. Entries may hold several lines, blank lines and comments.
func sshKeys(list []string) ([]string, error) {
	var keys []string
	for i, entry := range list {
		if strings.Contains(entry, "PRIVATE KEY-----") {
			return nil, errdefs.Invalidf("cloud-init: SSH key %d is a private key; give the public one (.pub)", i+1)
		}
		for line := range strings.Lines(entry) {
			line = strings.TrimSpace(line)
			if line == "" || line[0] == '#' {
				continue
			}
			if !isKey(line) {
				return nil, errdefs.Invalidf("cloud-init: SSH key %d is not a line of authorized_keys such as \"ssh-ed25519 AAAA... name\"", i+1)
			}
			if !slices.Contains(keys, line) {
				keys = append(keys, line)
			}
		}
	}
	if len(keys) > maxKeys {
		return nil, errdefs.Invalidf("cloud-init: %d SSH keys are given; at most %d are possible", len(keys), maxKeys)
	}
	return keys, nil
}

// isKey looks for a key type followed by base64. Options of any form may come before it.
func isKey(line string) bool {
	if !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
		return false
	}
	words := strings.Fields(line)
	for i, w := range words[:len(words)-1] {
		if (strings.HasPrefix(w, "ssh-") || strings.HasPrefix(w, "ecdsa-") || strings.HasPrefix(w, "sk-")) && strings.HasPrefix(words[i+1], "AAAA") {
			return true
		}
	}
	return false
}

func environment(env []vm.EnvVar) []File {
	if len(env) == 0 {
		return nil
	}
	var b strings.Builder
	for _, e := range env {
		value := e.Value
		if strings.ContainsAny(value, "\r\n") { // written as it is, it would become several lines
			value = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`, "`", "\\`").Replace(value) + `"`
		}
		b.WriteString(e.Name + "=" + value + "\n")
	}
	return []File{{Path: environmentFile, Data: []byte(b.String()), Mode: 0o644}}
}
