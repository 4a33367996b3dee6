package cli

import (
	"fmt"
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
			cloudInitFlags{
				sshKeys: []string{key, keys}, userData: user, metaData: file("meta", "a: 1"), vendorData: file("vendor", "#!/bin/sh\n"),
				network: file("net", "version: 2"), datasource: "NoCloud",
			},
			&vm.CloudInit{
				Datasource: "nocloud", UserData: "#cloud-config\na: 1\n", MetaData: "a: 1", VendorData: "#!/bin/sh\n",
				NetworkConfig: "version: 2", SSHKeys: []string{key, key + "\n"},
			}, "",
		},
		"dhcp":                 {cloudInitFlags{network: "dhcp"}, &vm.CloudInit{NetworkConfig: "dhcp"}, ""},
		"user":                 {cloudInitFlags{user: "joe"}, &vm.CloudInit{User: "joe"}, ""},
		"no user's name":       {cloudInitFlags{user: "1000:1000"}, nil, `"1000:1000" is not the name of a user`},
		"impossible password":  {cloudInitFlags{password: "a\nb"}, nil, "--password: the password has a line break"},
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

// Nobody but the command itself sees a password.
func TestPasswordIsHashed(t *testing.T) {
	got, err := (&cloudInitFlags{user: "joe", password: "hush hush"}).value()
	if err != nil || got.User != "joe" || !strings.HasPrefix(got.PasswordHash, "$6$") || strings.Contains(fmt.Sprintf("%+v", got), "hush") {
		t.Errorf("%+v, %v", got, err)
	}
}
