package kubevirt

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func dataVolumeOf(t *testing.T, text string) *v1beta1.DataVolume {
	t.Helper()
	dv := &v1beta1.DataVolume{}
	if err := yaml.UnmarshalStrict([]byte(text), dv); err != nil {
		t.Fatal(err)
	}
	return dv
}

const storage = "storage: {resources: {requests: {storage: 1Gi}}}"

func TestCheckDataVolume(t *testing.T) {
	for text, want := range map[string][]string{
		storage + ", source: {registry: {url: 'docker://example.org/disk'}}":                                                    nil,
		storage + ", source: {registry: {url: 'docker://example.org/disk', pullMethod: node, platform: {architecture: amd64}}}": nil,
		storage + ", source: {http: {url: 'https://example.org/disk.img?token=x'}}, contentType: kubevirt":                      nil,
		storage + ", source: {blank: {}}":                                                                 nil,
		storage + ", source: {snapshot: {namespace: ns, name: a}}":                                        nil,
		"storage: {}, source: {pvc: {namespace: ns, name: a}}":                                            nil,
		"pvc: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}, source: {blank: {}}": nil,
		"":                                  {"spec.source", "spec.storage"},
		"storage: {}, source: {blank: {}}":  {"spec.storage.resources.requests.storage"},
		"pvc: {}, source: {pvc: {name: a}}": {"spec.pvc.resources.requests.storage"},
		storage + ", pvc: {}, source: {blank: {}}":                                                         {"spec.storage"},
		storage + ", source: {}":                                                                           {"spec.source"},
		storage + ", source: {blank: {}, pvc: {name: a}}":                                                  {"spec.source"},
		storage + ", sourceRef: {kind: DataSource, name: a}":                                               {"spec.sourceRef"},
		storage + ", source: {s3: {url: a}}":                                                               {"spec.source.s3"},
		storage + ", source: {gcs: {url: a}}":                                                              {"spec.source.gcs"},
		storage + ", source: {imageio: {url: a, diskId: b}}":                                               {"spec.source.imageio"},
		storage + ", source: {vddk: {}}":                                                                   {"spec.source.vddk"},
		storage + ", source: {upload: {}}":                                                                 nil,
		storage + ", source: {pvc: {namespace: other, name: a}}":                                           {"spec.source.pvc.namespace"},
		storage + ", source: {pvc: {namespace: ns}}":                                                       {"spec.source.pvc.name"},
		storage + ", source: {snapshot: {namespace: other, name: a}}":                                      {"spec.source.snapshot.namespace"},
		storage + ", source: {registry: {}}":                                                               {"spec.source.registry.url"},
		storage + ", source: {registry: {url: 'oci-archive://x'}}":                                         {"spec.source.registry.url"},
		storage + ", source: {registry: {url: 'docker://x', secretRef: a}}":                                {"spec.source.registry.secretRef"},
		storage + ", source: {registry: {url: 'docker://x', certConfigMap: a}}":                            {"spec.source.registry.certConfigMap"},
		storage + ", source: {registry: {url: 'docker://x', imageStream: a}}":                              {"spec.source.registry.imageStream"},
		storage + ", source: {registry: {url: 'docker://x', platform: {architecture: arm}}}":               {"spec.source.registry.platform.architecture"},
		storage + ", source: {http: {url: 'ftp://x/y'}}":                                                   {"spec.source.http.url"},
		storage + ", source: {http: {url: 'http://me:secret@x/y'}}":                                        {"spec.source.http.url"},
		storage + ", source: {http: {url: 'http://x/y', secretRef: a, certConfigMap: b}}":                  {"spec.source.http.certConfigMap", "spec.source.http.secretRef"},
		storage + ", source: {http: {url: 'http://x/y', extraHeaders: [a], secretExtraHeaders: [b]}}":      {"spec.source.http.extraHeaders", "spec.source.http.secretExtraHeaders"},
		storage + ", source: {blank: {}}, contentType: archive":                                            {"spec.contentType"},
		storage + ", source: {blank: {}}, preallocation: true":                                             {"spec.preallocation"},
		storage + ", source: {blank: {}}, priorityClassName: a":                                            {"spec.priorityClassName"},
		storage + ", source: {blank: {}}, finalCheckpoint: true, checkpoints: [{previous: a, current: b}]": {"spec.checkpoints", "spec.finalCheckpoint"},
		"storage: {volumeName: a, selector: {}, dataSource: {kind: a, name: b}, dataSourceRef: {kind: a, name: b}, resources: {requests: {storage: 1Gi}}}, source: {blank: {}}": {
			"spec.storage.dataSource", "spec.storage.dataSourceRef", "spec.storage.selector", "spec.storage.volumeName",
		},
	} {
		dv := dataVolumeOf(t, "spec: {"+text+"}")
		var got []string
		for _, e := range CheckDataVolume(&dv.Spec, "ns", field.NewPath("spec")) {
			got = append(got, e.Field)
		}
		slices.Sort(got)
		if d := diff.Of(want, got); d != "" {
			t.Errorf("%s: %s", text, d)
		}
	}
}

func TestClaim(t *testing.T) {
	dv := dataVolumeOf(t, "metadata: {name: disk, namespace: ns, uid: u, labels: {a: b}, annotations: {volume.kubernetes.io/selected-node: x}}\nspec: {"+storage+", source: {registry: {url: 'docker://example.org/disk'}}}")
	claim := Claim(dv)
	if claim.Name != "disk" || claim.Namespace != "ns" || claim.OwnerReferences[0].UID != "u" || *claim.Spec.VolumeMode != corev1.PersistentVolumeBlock || claim.Spec.AccessModes[0] != corev1.ReadWriteOnce {
		t.Errorf("%+v", claim)
	}
	if d := diff.Of(map[string]string{contract.KeyVolumeImage: "docker://example.org/disk"}, claim.Annotations); d != "" {
		t.Error(d)
	}
	if d := diff.Of(map[string]string{"a": "b", LabelClaim: LabelClaimValue}, claim.Labels); d != "" {
		t.Error(d)
	}
	pvc := Claim(dataVolumeOf(t, "spec: {pvc: {accessModes: [ReadOnlyMany], resources: {requests: {storage: 1Gi}}}, source: {pvc: {name: a}}}"))
	if pvc.Spec.VolumeMode != nil || pvc.Spec.AccessModes[0] != corev1.ReadOnlyMany || pvc.Spec.DataSource.Kind != "PersistentVolumeClaim" || pvc.Spec.DataSource.Name != "a" || len(pvc.Annotations) != 0 {
		t.Errorf("%+v", pvc)
	}
	snapshot := Claim(dataVolumeOf(t, "spec: {"+storage+", source: {snapshot: {name: a}}}"))
	if s := snapshot.Spec.DataSource; s.Kind != "VolumeSnapshot" || *s.APIGroup != snapshotGroup || s.Name != "a" {
		t.Errorf("%+v", s)
	}
	blank := Claim(dataVolumeOf(t, "spec: {"+storage+", source: {blank: {}}}"))
	if blank.Spec.DataSource != nil || len(blank.Annotations) != 0 {
		t.Errorf("%+v", blank)
	}
}

func TestMachineWithDataVolumes(t *testing.T) {
	vm := &v1.VirtualMachine{}
	if err := yaml.UnmarshalStrict([]byte(`
metadata: {name: web, namespace: ns, uid: u}
spec:
  runStrategy: Always
  dataVolumeTemplates:
  - {metadata: {name: a, labels: {x: z}}, spec: {`+storage+`, source: {blank: {}}}}
  template:
    spec:
      domain: {devices: {}, memory: {guest: 1Gi}}
      volumes:
      - {name: root, dataVolume: {name: a}}
      - {name: data, persistentVolumeClaim: {claimName: b}}
`), vm); err != nil {
		t.Fatal(err)
	}
	if errs, warnings := CheckMachine(vm, Base{}); len(errs)+len(warnings) > 0 {
		t.Errorf("%v, %q", errs, warnings)
	}
	dv := DataVolume(vm, &vm.Spec.DataVolumeTemplates[0])
	if dv.Name != "a" || dv.Namespace != "ns" || dv.OwnerReferences[0].UID != "u" || dv.Labels["x"] != "z" || dv.Labels[v1.CreatedByLabel] != "u" {
		t.Errorf("%+v", dv)
	}
	pod := Pod(&v1.VirtualMachineInstance{Spec: vm.Spec.Template.Spec})
	if c := pod.Spec.Containers[0]; c.Image != "volume://root" || len(c.VolumeDevices) != 2 || pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName != "a" {
		t.Errorf("%+v, %+v", c, pod.Spec.Volumes)
	}
	vm.Spec.Template.Spec.Volumes[0].DataVolume.Hotpluggable = true
	if root := rootVolume(&vm.Spec.Template.Spec); root.Name != "data" {
		t.Errorf("it boots from %s", root.Name)
	}
	again := vm.Spec.DataVolumeTemplates[0].DeepCopy()
	again.Namespace = "other"
	vm.Spec.DataVolumeTemplates = append(vm.Spec.DataVolumeTemplates, *again, v1.DataVolumeTemplateSpec{})
	var got []string
	errs, _ := CheckMachine(vm, Base{})
	for _, e := range errs {
		got = append(got, e.Type.String()+" "+e.Field)
	}
	if d := diff.Of([]string{
		"Duplicate value spec.dataVolumeTemplates[1].metadata.name", "Required value spec.dataVolumeTemplates[2].metadata.name",
		"Required value spec.dataVolumeTemplates[2].spec.storage", "Required value spec.dataVolumeTemplates[2].spec.source",
	}, got); d != "" {
		t.Error(d)
	}
}
