package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestCloudInitFlags(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	const key = "ssh-ed25519 AAAAC3Nz me@host"
	keys, user := file("keys", key+"\n"), file("user", "#cloud-config\na: 1\n")
	for name, tc := range map[string]struct {
		flags cloudInitFlags
		want  *vm.CloudInit
		err   string
	}{
		"none": {cloudInitFlags{}, nil, ""},
		"all": {
			cloudInitFlags{[]string{key, keys}, user, file("meta", "a: 1"), file("vendor", "#!/bin/sh\n"), file("net", "version: 2"), "NoCloud"},
			&vm.CloudInit{
				Datasource: "nocloud", UserData: "#cloud-config\na: 1\n", MetaData: "a: 1", VendorData: "#!/bin/sh\n",
				NetworkConfig: "version: 2", SSHKeys: []string{key, key + "\n"},
			}, "",
		},
		"dhcp":                 {cloudInitFlags{network: "dhcp"}, &vm.CloudInit{NetworkConfig: "dhcp"}, ""},
		"no such file":         {cloudInitFlags{userData: dir + "/none"}, nil, "--user-data"},
		"no such key file":     {cloudInitFlags{sshKeys: []string{dir + "/none"}}, nil, "--ssh-key"},
		"private key":          {cloudInitFlags{sshKeys: []string{file("id", "-----BEGIN OPENSSH PRIVATE KEY-----\nx\n")}}, nil, "private key"},
		"empty file":           {cloudInitFlags{userData: file("empty", "\n")}, nil, "is empty"},
		"file too large":       {cloudInitFlags{userData: file("large", strings.Repeat("#", cloudinit.MaxDocument+1))}, nil, "larger than"},
		"other data source":    {cloudInitFlags{datasource: "ec2"}, nil, `invalid data source "ec2"`},
		"user data of nothing": {cloudInitFlags{userData: file("nothing", "a: 1")}, nil, "begin it with #cloud-config"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := tc.flags.value()
			if tc.err != "" {
				if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("%v", err)
				}
				return
			}
			if d := diff.Of(tc.want, got); err != nil || d != "" {
				t.Errorf("%v, %s", err, d)
			}
		})
	}
}
