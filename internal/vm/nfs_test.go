package vm

import (
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestNFSValidate(t *testing.T) {
	long := strings.Repeat("a", 200)
	for _, n := range []NFS{
		{Server: "files", Path: "/"},
		{Server: "files.default.svc.cluster.local.", Path: "/export/a b,c:d"},
		{Server: "10.0.0.1", Path: "/data/"},
		{Server: "fd00::1", Path: "/data"},
		{Server: "fe80::1%eth0", Path: "/data"},
		{Server: "files", Path: "/data", Options: []string{"hard", "nfsvers=4.1,timeo=600", "defaults", "sec=sys", "port=12049", "proto=tcp6", "lookupcache=none", ""}},
	} {
		if err := n.Validate(); err != nil {
			t.Errorf("%+v: %v", n, err)
		}
	}
	for want, n := range map[string]NFS{
		`"" is not the name`:                          {Path: "/data"},
		`"a,addr=10.0.0.1" is not the name`:           {Server: "a,addr=10.0.0.1", Path: "/data"},
		`"a\nb" is not the name`:                      {Server: "a\nb", Path: "/data"},
		`"-o" is not the name`:                        {Server: "-o", Path: "/data"},
		`"a:/x" is not the name`:                      {Server: "a:/x", Path: "/data"},
		`"[fd00::1]" is not the name`:                 {Server: "[fd00::1]", Path: "/data"},
		`"fe80::1%a,b" is not the name`:               {Server: "fe80::1%a,b", Path: "/data"},
		`"a\x00" is not the name`:                     {Server: "a\x00", Path: "/data"},
		long:                                          {Server: long + long, Path: "/data"},
		`"data" is not a path`:                        {Server: "a", Path: "data"},
		`"" is not a path`:                            {Server: "a"},
		`"/data/../etc" is not a path`:                {Server: "a", Path: "/data/../etc"},
		`"/data\nx" is not a path`:                    {Server: "a", Path: "/data\nx"},
		`"/data\x00x" is not a path`:                  {Server: "a", Path: "/data\x00x"},
		"at most 1024 are possible":                   {Server: "a", Path: "/" + strings.Repeat("a/", 600)},
		`mount option "nfsvers=3" is not supported`:   {Server: "a", Path: "/", Options: []string{"nfsvers=3"}},
		`mount option "vers=4.3" is not supported`:    {Server: "a", Path: "/", Options: []string{"vers=4.3"}},
		`mount option "sec=krb5" is not supported`:    {Server: "a", Path: "/", Options: []string{"sec=krb5"}},
		`mount option "addr=10.0.0.1" is not`:         {Server: "a", Path: "/", Options: []string{"addr=10.0.0.1"}},
		`mount option "clientaddr=10.0.0.1" is not`:   {Server: "a", Path: "/", Options: []string{"hard,clientaddr=10.0.0.1"}},
		`mount option "source=b:/" is not supported`:  {Server: "a", Path: "/", Options: []string{"source=b:/"}},
		`mount option "hard=1" is not supported`:      {Server: "a", Path: "/", Options: []string{"hard=1"}},
		`mount option "timeo=" is not supported`:      {Server: "a", Path: "/", Options: []string{"timeo="}},
		`mount option "timeo=-1" is not supported`:    {Server: "a", Path: "/", Options: []string{"timeo=-1"}},
		`mount option "timeo=1\nro" is not supported`: {Server: "a", Path: "/", Options: []string{"timeo=1\nro"}},
		`mount option "port=70000" is not supported`:  {Server: "a", Path: "/", Options: []string{"port=70000"}},
		`mount option "port=0" is not supported`:      {Server: "a", Path: "/", Options: []string{"port=0"}},
		`mount option "rsize=9999999999" is not`:      {Server: "a", Path: "/", Options: []string{"rsize=9999999999"}},
		"more than 32 mount options":                  {Server: "a", Path: "/", Options: slices.Repeat([]string{"hard"}, 33)},
	} {
		v := Volume{Name: "data", Kind: VolumeNFS, NFS: &n}
		if err := (Spec{Volumes: []Volume{v}}).ValidateVolumes(); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "volume data: ") {
			t.Errorf("%+v: %v, want %q in it", n, err, want)
		}
	}
	for _, v := range []Volume{
		{Name: "data", Kind: VolumeNFS},
		{Name: "data", Kind: VolumeEmpty, NFS: &NFS{Server: "a", Path: "/"}},
		{Name: "data", Kind: VolumeNFS, NFS: &NFS{Server: "a", Path: "/"}, Group: new(int64)},
	} {
		if err := (Spec{Volumes: []Volume{v}}).ValidateVolumes(); !errdefs.IsInvalid(err) {
			t.Errorf("%+v: %v", v, err)
		}
	}
}

func TestNFSVersionsAndSource(t *testing.T) {
	if v, port := (NFS{Options: []string{"vers=4,hard"}}).Versions(); !slices.Equal(v, []string{"4.2", "4.1", "4.0"}) || port != 2049 {
		t.Errorf("%v at %d", v, port)
	}
	if v, port := (NFS{Options: []string{"nfsvers=4.1", "port=20049"}}).Versions(); !slices.Equal(v, []string{"4.1"}) || port != 20049 {
		t.Errorf("%v at %d", v, port)
	}
	for want, n := range map[string]NFS{"files:/a": {Server: "files", Path: "/a"}, "[fd00::1]:/a": {Server: "fd00::1", Path: "/a"}} {
		if got := n.Source(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	got, err := ParseNFSOptions([]string{"defaults,hard", "timeo=600", "_netdev,nfsvers=4"})
	if err != nil || !slices.Equal(got, []NFSOption{{Name: "hard"}, {Name: "timeo", Value: "600"}}) {
		t.Errorf("%v, %v", got, err)
	}
}
