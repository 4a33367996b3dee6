package contract

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func fullVirtlet() Virtlet {
	return Virtlet{
		VCPUs: 3, DiskDriver: "virtio", RootVolumeSize: resource.MustParse("4Gi"), CPUModel: "host-model", CPUSetting: "mode: x",
		SystemUUID: "2a1b6ba1-5c4f-4f7b-8d3e-0a1b2c3d4e5f", ChownMounts: true, ImageType: "configdrive", MetaData: "a: 1", UserData: "b: 2",
		UserDataOverwrite: true, UserDataScript: "#!/bin/sh", UserDataSource: Source{Kind: SourceSecret, Name: "s"}, UserDataKey: "k",
		UserDataEncoding: EncodingBase64, SSHKeys: "ssh-rsa AAAA\n", SSHKeySource: Source{Kind: SourceConfigMap, Name: "c", Key: "k"},
		Files: Source{Kind: SourceConfigMap, Name: "f"}, ForceDHCP: true,
	}
}

func TestVirtletSetsAndClears(t *testing.T) {
	m := map[string]string{"other": "kept"}
	fullVirtlet().Apply(m)
	if len(m) != 20 {
		t.Errorf("%d keys are set", len(m))
	}
	got, err := ParseVirtlet(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := fullVirtlet(); got.RootVolumeSize.Cmp(want.RootVolumeSize) != 0 {
		t.Errorf("size %s", got.RootVolumeSize.String())
	} else {
		got.RootVolumeSize = want.RootVolumeSize
		if d := diff.Of(want, got); d != "" {
			t.Errorf("read back: %s", d)
		}
	}
	Virtlet{}.Apply(m)
	if !maps.Equal(m, map[string]string{"other": "kept"}) {
		t.Errorf("left %v", m)
	}
}

func TestVirtletRules(t *testing.T) {
	parse := func(kv ...string) Virtlet {
		m := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		v, err := ParseVirtlet(m)
		if err != nil {
			t.Errorf("%v: %v", kv, err)
		}
		return v
	}
	for _, word := range []string{"True", "1", "yes", "TRUE", " true", ""} {
		if v := parse(KeyVirtletForceDHCP, word, KeyVirtletUserDataOverwrite, word, KeyVirtletChownMounts, word); v != (Virtlet{}) {
			t.Errorf("%q is true", word)
		}
	}
	if v := parse(KeyVirtletVCPUs, "-3"); v.VCPUs != 0 {
		t.Errorf("a negative count is %d", v.VCPUs)
	}
	if v := parse(KeyVirtletVCPUs, "255"); v.VCPUs != 255 {
		t.Errorf("255 is %d", v.VCPUs)
	}
	if v := parse(KeyVirtletImageType, "ConfigDrive"); v.ImageType != "configdrive" {
		t.Errorf("ConfigDrive is %q", v.ImageType)
	}
	for _, size := range []string{"0", "-1Gi"} {
		if v := parse(KeyVirtletRootVolumeSize, size); !v.RootVolumeSize.IsZero() {
			t.Errorf("%s is %s", size, v.RootVolumeSize.String())
		}
	}
	if v := parse(KeyVirtletSSHKeySource, "secret/keys"); v.SSHKeySource != (Source{Kind: "secret", Name: "keys"}) {
		t.Errorf("source %+v", v.SSHKeySource)
	}
	if parse(KeyVirtletVCPUs, "2", KeyVirtletDiskDriver, "scsi").CloudInit() || !parse(KeyVirtletSSHKeys, "x").CloudInit() {
		t.Error("CloudInit is wrong")
	}
}

func TestVirtletReportsEveryBadKey(t *testing.T) {
	_, err := ParseVirtlet(map[string]string{
		KeyVirtletVCPUs: "256", KeyVirtletDiskDriver: "ide", KeyVirtletRootVolumeSize: "big", KeyVirtletCPUModel: "486",
		KeyVirtletSystemUUID: "x", KeyVirtletImageType: "ec2", KeyVirtletUserDataSource: "configmap/a/b", KeyVirtletUserDataKey: "a b",
		KeyVirtletUserDataEncoding: "rot13", KeyVirtletSSHKeySource: "file/a", KeyVirtletFiles: "secret/../x",
	})
	errs, ok := errors.AsType[Errors](err)
	if !ok || len(errs) != 11 {
		t.Fatalf("%d errors in %v, want 11", len(errs), err)
	}
	for _, e := range errs {
		if !strings.Contains(err.Error(), e.Key) || e.Reason == "" {
			t.Errorf("the message does not tell of %s: %v", e.Key, err)
		}
	}
	if _, err := ParseVirtlet(map[string]string{KeyVirtletUserDataKey: "k"}); err == nil {
		t.Error("a key without its source was taken")
	}
}

// For any annotations, parsing must not panic, and the parsed values must survive Apply and a second parse.
func FuzzParseVirtlet(f *testing.F) {
	f.Add("2", "virtio", "10Gi", "NoCloud", "configmap/a", "k", "base64", "secret/a/b", "true", "a: 1")
	f.Add("-1", "scsi", "-1", "", "", "", "", "", "", "")
	f.Add("99999999999999999999", "x", "9e18Ei", "EC2", "secret//", "", "plain", "configmap/a/b/c", "True", "\x00")
	f.Fuzz(func(t *testing.T, cpus, driver, size, kind, source, key, encoding, ssh, flag, doc string) {
		v, err := ParseVirtlet(map[string]string{
			KeyVirtletVCPUs: cpus, KeyVirtletDiskDriver: driver, KeyVirtletRootVolumeSize: size, KeyVirtletImageType: kind,
			KeyVirtletUserDataSource: source, KeyVirtletUserDataKey: key, KeyVirtletUserDataEncoding: encoding, KeyVirtletSSHKeySource: ssh,
			KeyVirtletForceDHCP: flag, KeyVirtletUserData: doc, KeyVirtletFiles: source, KeyVirtletSystemUUID: doc,
		})
		if err != nil {
			_ = err.Error()
			if v.UserDataSource == (Source{}) {
				v.UserDataKey = "" // it needs the source, which was invalid
			}
		}
		out := map[string]string{}
		v.Apply(out)
		again, err := ParseVirtlet(out)
		if err != nil {
			t.Fatalf("what Apply wrote cannot be read: %v", err)
		}
		if again.RootVolumeSize.Cmp(v.RootVolumeSize) != 0 {
			t.Fatalf("size changed from %s to %s", v.RootVolumeSize.String(), again.RootVolumeSize.String())
		}
		again.RootVolumeSize, v.RootVolumeSize = resource.Quantity{}, resource.Quantity{}
		if d := diff.Of(v, again); d != "" {
			t.Fatalf("read back: %s", d)
		}
	})
}
